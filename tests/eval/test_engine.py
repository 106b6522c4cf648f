from functools import cache, partial

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

from seergate import GateBank, GateConfig, Offload, Paging, attached, methods
from seergate.eval.generation import batch
from seergate.eval.generation.batch import Batch, common_prefix, shares_prefix
from seergate.eval.generation.costs import RowStats
from seergate.eval.generation.samples import Generation, Limit, Request, text_of
from seergate.eval.sampling import SampledRow, Sampling, TokenChooser, sample_seed
from seergate.eval.tasks.prompts import encode, end_ids, prompt_text
from seergate.eval.tasks.task import Problem
from seergate.pretrained import beginning
from tests.support import evaluation as support
from tests.support.evictors import EVICTORS
from tests.support.evictors import _with_gate as with_gate
from tests.support.models import prompt as random_prompt
from tests.support.models import tiny_model
from tests.support.running import invalid, refused


def requests_for(prompts):
    ids = [tuple(encode(support.tokenizer(), prompt)) for prompt in prompts]
    return [Request(i, prompt, ids[i], sample_seed(0, f"p{i}", 0)) for i, prompt in enumerate(prompts)]


def run(model, prompts, *, batch_size, max_new_tokens=12, sampling=None, method="dense", **options):
    """Key -> generation, in the order in which they ended."""
    generations: dict = {}

    def keep(generation):
        assert generation.request.key not in generations
        generations[generation.request.key] = generation

    requests = requests_for(prompts)
    with attached(model, method, **options) as handle:
        how = {"batch_size": batch_size, "limit": Limit(max_new_tokens), "sampling": sampling}
        support.engine(handle, keep, **how, prefix=common_prefix([each.ids for each in requests])).run(requests)
    return generations


PROMPTS = ["a1 1 a2 2", "a1 1 a2 2 a3 3 a4 4 a5 5 a6 6", "a9", "[a7] 3 [a8] 4 a9"]


def tokens(generations):
    return {key: generation.token_ids for key, generation in sorted(generations.items())}


LONG = [" ".join(f"a{i} {i % 10}" for i in range(1, n)) for n in (30, 3, 55, 12, 41, 8, 20)]
SAMPLED = Sampling(temperature=1.5, top_p=0.95, top_k=50)
METHODS = {
    "dense": {},
    "oracle": {"token_budget": 32, "block_size": 8},
    "quest": {"token_budget": 32, "block_size": 8, "dense_layers": ()},
    "streaming_llm": {"token_budget": 24, "sink_tokens": 2, "interval": 4},
    "h2o": {"token_budget": 32},
    "rpc": {"interval": 16, "window": 4},
    "gate": {},
}


def arguments_of(method, model):
    if method != "gate":
        return {"method": method, **METHODS[method]}
    bank = GateBank.for_model(model, GateConfig(block_size=8, gate_dim=16))
    return {"method": bank, "token_budget": 32}


@pytest.mark.parametrize("sampling", support.mostly_soak([Sampling(), SAMPLED], SAMPLED))
@pytest.mark.parametrize("method", support.mostly_soak(METHODS, "dense", "h2o", "gate"))
def test_an_answer_does_not_depend_on_its_batch(method, sampling):
    """Rows of different length that come and go at different times, in batches of one, three and all."""
    model = support.model()
    probe = run(model, LONG[:1], batch_size=1, max_new_tokens=60, sampling=sampling)[0]
    model.generation_config.eos_token_id = sorted(set(probe.token_ids))[::3]  # so that answers end here and there
    chosen = arguments_of(method, model)
    alone = run(model, LONG, batch_size=1, max_new_tokens=70, sampling=sampling, **chosen)
    assert len({generation.n_tokens for generation in alone.values()}) > 2
    for size in (3, 7):
        same(run(model, LONG, batch_size=size, max_new_tokens=70, sampling=sampling, **chosen), alone)


@pytest.mark.parametrize("method", ["dense", "quest", "h2o"])
def test_a_prompt_of_one_token_is_a_prompt(method):
    """It takes the place of a row while another is being decoded."""
    model, texts = support.model(), [LONG[2], LONG[1], "a9"]
    assert len(encode(support.tokenizer(), texts[2])) == 1
    probe = run(model, texts[1:2], batch_size=1, max_new_tokens=9)[0]
    model.generation_config.eos_token_id = [probe.token_ids[-1]]
    alone = run(model, texts, batch_size=1, max_new_tokens=40, **arguments_of(method, model))
    assert alone[1].n_tokens < alone[0].n_tokens
    same(run(model, texts, batch_size=2, max_new_tokens=40, **arguments_of(method, model)), alone)


def same(together, alone):
    """Tokens, and what is reported about them."""
    assert tokens(together) == tokens(alone)
    for key, generation in together.items():
        for name in ("density", "cached_tokens", "bytes_read_per_step", "own_bytes_mean", "own_bytes_peak"):
            assert generation.costs.get(name, 0) == pytest.approx(alone[key].costs.get(name, 0), rel=1e-9), name
        assert generation.costs.get("read_curve") == alone[key].costs.get("read_curve")


COMPRESSING = {
    "h2o": arguments_of("h2o", None),
    "kv4bit": {"method": "kv4bit", "residual": 8, "group": 8},
    "r_kv": {"method": "r_kv", "token_budget": 24, "window": 8, "interval": 4},
    "streaming_llm": {"method": "streaming_llm", "token_budget": 24, "interval": 8},
    "pages": {"method": "quest", "token_budget": 32, "block_size": 8, "storage": Paging()},
}
WHOLE = ("streaming_llm", "pages")
"""Prompts of these are prefilled in one piece."""


@pytest.mark.parametrize(
    ("method", "size"), [("gate", 1), *((name, 2) for name in ("dense", "quest", "gate", "resa", *COMPRESSING))]
)
def test_a_common_prefix_is_prefilled_once(method, size, monkeypatch):
    """With the answers and costs of whole prompts, whichever arrive together."""
    model, seen = support.model(), []
    prompts = [f"{LONG[0]} {end}" for end in ("a9 1", "a9", "a9 1 a8 2 a7 3", "a9 5 a4", "a9 5 a4")]
    prefix_length = len(encode(support.tokenizer(), LONG[0]))
    resa = {"method": methods.ReSA(token_budget=32, block_size=8, rectify_every=4)}
    chosen = COMPRESSING.get(method) or (resa if method == "resa" else arguments_of(method, model))
    alone = run(model, prompts, batch_size=size, max_new_tokens=9, **chosen)
    monkeypatch.setattr(batch, "SHARED_TOKENS", 2)
    hook = model.get_input_embeddings().register_forward_hook(lambda _, args, output: seen.append(args[0].shape))
    same(run(model, prompts, batch_size=size, max_new_tokens=9, **chosen), alone)
    hook.remove()
    first, *others = [shape[1] for shape in seen if shape[1] > 1 and shape[1] != 4]  # ReSA reads 4 tokens again
    assert (first == prefix_length - 1 and max(others) < prefix_length) == (method not in WHOLE)


def test_which_prefix_is_common():
    short, long = tuple(range(300)), tuple(range(400))
    assert common_prefix([long, short, (*short, 7)]) == short[:298]  # two tokens of each prompt are left
    assert common_prefix([long, long]) == long[:398]
    for prompts in ([], [long], [long[:257], long], [(), long]):
        assert common_prefix(prompts) == ()
    with attached(tiny_model("gemma3_text"), "dense") as handle:  # its sliding windows are not gated
        assert not shares_prefix(handle)


def test_a_prefix_is_given_up_for_memory(monkeypatch):
    """If one sample fits, but not the prefix beside it."""
    monkeypatch.setattr(batch, "SHARED_TOKENS", 2)
    model, prompts = support.model(), [f"{LONG[0]} {end}" for end in ("a9 1", "a9 1 a8 2")]
    alone, started = run(model, prompts, batch_size=1), Batch._started

    def no_room(batch, rows):
        if batch.prefix:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return started(batch, rows)

    monkeypatch.setattr(Batch, "_started", no_room)
    same(run(model, prompts, batch_size=2), alone)


def test_the_peak_of_a_sample_counts_its_prompt():
    """The prompt is held whole until it has been read, however little is kept of it."""
    model, peaks = support.model(), []
    for length, budget in ((400, 24), (400, 4096), (12, 24)):
        prompt = " ".join(f"a{1 + i % 60}" for i in range(length))
        with attached(model, methods.H2O(token_budget=budget, interval=4)) as handle:

            def keep(generation, handle=handle):
                peaks.append(generation.costs["own_bytes_peak"])
                assert peaks[-1] <= handle.stats()["resident_bytes_peak"]

            support.engine(handle, keep, limit=Limit(40)).run(requests_for([prompt]))
    token = 2 * (2 * 2 * 16 * 4 + 2 * 4)  # two layers: two heads of keys and values in float32, and the mass received
    assert peaks == [400 * token, (400 + 39) * token, 28 * token]


def test_an_engine_runs_again_after_a_run_that_ended_or_failed():
    results, fail = [], [False, False, True, False]

    def keep(generation):
        if fail.pop(0):
            raise InterruptedError
        results.append((generation.request.key, generation.token_ids, generation.costs))

    with attached(support.model(), "quest", token_budget=16, block_size=8) as handle:
        engine = support.engine(handle, keep, batch_size=2, limit=Limit(12))
        engine.run(requests_for(PROMPTS[:1]))
        engine.run(requests_for(PROMPTS[:1]))
        with pytest.raises(InterruptedError):
            engine.run(requests_for(PROMPTS[1:]))
        engine.run(requests_for(PROMPTS[:1]))
    assert results[0][2] and results == results[:1] * 3


def two_rows(handle, *lengths):
    """What a step costs two rows with prompts of these lengths."""
    stats, batch = handle.count_with(RowStats), Batch(handle.model)
    batch.add([[5] * lengths[0], [6] * lengths[1]])
    stats.add_rows(2)
    batch.step([7, 7])
    return [stats.of(row) for row in range(2)]


def test_rows_that_read_their_prompts_together_hold_their_own():
    with attached(support.model(), methods.H2O(token_budget=24, interval=4)) as handle:
        both = two_rows(handle, 400, 10)
    assert both[0]["own_bytes_peak"] == both[1]["own_bytes_peak"] * 400 / 11
    assert both[0]["own_bytes_mean"] == both[1]["own_bytes_mean"] * 25 / 11


def test_what_a_row_of_a_method_that_selects_holds():
    """Its tokens, of Quest two bounds per page, of the gate a compressed key per block and its newest raw keys."""
    model = support.model()
    bank = GateBank.for_model(model, GateConfig(block_size=8, gate_dim=16))
    token, tokens = 2 * 2 * 2 * 16 * 4, 22
    for method, options, state in (
        ("dense", {}, 0),
        ("quest", METHODS["quest"], 3 * 2 * 2 * 2 * 16 * 4),
        (bank, {"token_budget": 32}, 2 * (3 * 2 * 16 * 4 + 2 * 16 * 16 * 4 + 8)),
    ):
        with attached(model, method, **options) as handle:
            assert two_rows(handle, 21, 90)[0]["own_bytes_mean"] == tokens * token + state, method
    for storage in (Paging(block_size=8), Offload(memory_bytes=2**20, store="host")):
        with attached(model, "oracle", token_budget=32, block_size=8, storage=storage) as handle:
            (short, long), peak = two_rows(handle, 21, 90), handle.stats()["resident_bytes_peak"]
        if isinstance(storage, Paging):  # whole pages: 22 and 91 tokens take 3 and 12
            assert (short["own_bytes_mean"], long["own_bytes_mean"]) == (24 * token, 96 * token)
        assert short["own_bytes_peak"] + long["own_bytes_peak"] == peak


OTHERS = {
    **{name: row.method for name, row in EVICTORS.items()},
    "snapkv and gate that covers some": with_gate(partial(methods.SnapKV, token_budget=24, window=6, interval=8), 64),
    "resa": lambda m: methods.ReSA(token_budget=16, block_size=4, rectify_every=5),
}


@pytest.mark.filterwarnings("ignore:.*a prompt has .* tokens and token_budget")
@pytest.mark.parametrize("name", support.mostly_soak(OTHERS, "snapkv and gate that covers some", "resa"))
def test_an_answer_does_not_depend_on_its_batch_whatever_is_evicted_or_rectified(name):
    """Greedy, every evictor, alone and with the gate, four bits, and dense passes in between."""
    model, prompts = support.model(), [LONG[i] for i in (3, 1, 2, 5)]
    method = OTHERS[name](model)
    model.generation_config.eos_token_id = end_tokens()
    alone = run(model, prompts, batch_size=1, max_new_tokens=32, method=method)
    assert len({generation.n_tokens for generation in alone.values()}) > 1
    same(run(model, prompts, batch_size=3, max_new_tokens=32, method=method), alone)


@cache
def end_tokens():
    """Some that dense answers have, so that answers end here and there."""
    return sorted(set(run(support.model(), LONG[:1], batch_size=1, max_new_tokens=30)[0].token_ids))[::4]


def test_a_greedy_answer_is_what_generate_says():
    model, tokenizer = support.model(), support.tokenizer()
    generations = run(model, LONG, batch_size=3, max_new_tokens=20)
    for i, prompt in enumerate(LONG):
        ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        new = expected[0, ids.shape[1] :].tolist()
        stop = new.index(support.END) + 1 if support.END in new else len(new)
        assert list(generations[i].token_ids) == new[:stop]


def test_finished_rows_are_replaced_at_once():
    """One long answer and many short ones: with two rows, the short ones pass through beside the long one."""
    model = support.model()
    free = run(model, PROMPTS[:1], batch_size=1, max_new_tokens=40)[0]
    model.generation_config.eos_token_id = [free.token_ids[-1]]
    counted: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: counted.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    lengths = [g.n_tokens for g in run(model, PROMPTS, batch_size=1, max_new_tokens=40).values()]
    alone, counted[:] = len(counted), []
    run(model, PROMPTS, batch_size=4, max_new_tokens=40)
    hook.remove()
    assert alone == sum(lengths)
    assert len(counted) == max(lengths)
    assert sum(counted[1:]) == sum(lengths) - len(lengths)  # no step is spent on a row that has ended


def test_models_with_other_layers_are_served_without_refill():
    """Gemma 3's sliding-window layers keep all rows at one slot."""
    model = tiny_model("gemma3_text", vocab_size=len(support.tokenizer()))
    alone = run(model, LONG, batch_size=1, max_new_tokens=20)
    assert tokens(run(model, LONG, batch_size=3, max_new_tokens=20)) == tokens(alone)


def test_the_limit_may_count_the_prompt():
    generations: dict = {}
    with attached(support.model(), "dense") as handle:
        engine = support.engine(handle, lambda g: generations.update({g.request.key: g}), limit=Limit(None, 16))
        engine.run(requests_for(PROMPTS))
    assert {key: g.n_tokens + len(g.request.ids) for key, g in generations.items()} == dict.fromkeys(range(4), 16)
    assert [Limit(10).of(500), Limit(10, 100).of(95)] == [10, 5]
    assert [Limit(None, 100).of(length) for length in (60, 100)] == [40, 0]
    for wrong, message in (((0,), "max_new_tokens is 0"), ((), "neither")):
        invalid(message, Limit, *wrong)


def test_the_end_token_ends_an_answer():
    model = support.model()
    free = run(model, ["a1 1 a2 2"], batch_size=1)
    end = free[0].token_ids[4]
    model.generation_config.eos_token_id = [end]
    generations = run(model, ["a1 1 a2 2", "a3 4 5"], batch_size=2)
    first = free[0].token_ids.index(end)
    assert generations[0].token_ids == free[0].token_ids[: first + 1]
    assert generations[0].finish_reason == "stop"
    assert len(generations[0].completion.split()) == first  # the end token is counted but not part of the text
    for ids, ends in ((None, {support.END}), (7, {7, support.END}), ([support.END, 7], {7, support.END})):
        assert end_ids(support.model(ids), support.tokenizer()) == ends  # the tokenizer's too


def choose(sampling, scores, seeds):
    return torch.tensor(TokenChooser(sampling)(scores, [SampledRow([0], seed) for seed in seeds]))


def test_draws_follow_the_softmax():
    scores = torch.tensor([[0.0, 1.0, -torch.inf, 2.0, -torch.inf]]).repeat(4000, 1)
    share = torch.bincount(choose(Sampling(temperature=1.0), scores, range(4000)), minlength=5) / 4000
    torch.testing.assert_close(share, torch.softmax(scores[0], 0), atol=0.03, rtol=0)
    assert share[2] == share[4] == 0
    scores = torch.tensor([[0.0, 1.0, 2.0, 1.5]]).repeat(300, 1)
    for temperature in (0.7, 2):
        assert set(choose(Sampling(temperature=temperature, top_k=2), scores, range(300)).tolist()) == {2, 3}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_p=0.9), Sampling(temperature=1e-40)])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_refused(sampling, bad):
    scores = torch.tensor([[0.0, 1.0, 2.0], [0.0, 3.0, 1.0]])
    if sampling.temperature != 1e-40:  # whose division overflows
        scores[1, 2] = bad
    refused("the model's logits are not finite", choose, sampling, scores, range(2))


def test_repetition_is_penalised():
    chooser = TokenChooser(Sampling(repetition_penalty=2))  # an integer, as from YAML
    row = SampledRow([1], 0)
    assert chooser(torch.tensor([[0.0, 3.0, 2.0]]), [row]) == [2]  # 3 / 2 < 2
    row.tokens.append(2)
    assert chooser(torch.tensor([[0.0, 3.0, 2.0]]), [row]) == [1]


def test_a_generation_configuration_that_is_not_followed_is_refused():
    model = support.model()
    model.generation_config.update(do_sample=True, temperature=0.6, top_p=0.95, top_k=20)
    assert Sampling.of_model(model) == Sampling(0.6, 20, 0.95)
    assert str(Sampling.of_model(model)) == "temperature 0.6, top-k 20, top-p 0.95"
    for name, value in {
        "no_repeat_ngram_size": 3,
        "encoder_no_repeat_ngram_size": 1,
        "top_h": 0.4,
        "stop_strings": ["."],
        "token_healing": True,
    }.items():
        setattr(model.generation_config, name, value)
        refused(f"sets {name}=", Sampling.of_model, model)
        setattr(model.generation_config, name, None)


def test_bad_sampling_is_refused():
    for name, value in {"temperature": -1, "top_p": 0, "top_k": -1, "min_p": 1, "repetition_penalty": 0}.items():
        invalid(f"{name} is", Sampling, **{name: value})


FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(("kind", "more"), [("dynamic", {}), ("longrope", FACTORS)])
@torch.inference_mode()
def test_rope_whose_frequencies_change_is_decoded_up_to_where_they_do(kind, more):
    """Up to there the logits are those of a pass without a cache and do not depend on other rows."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0} | more
    model = tiny_model("qwen3", rope_parameters=rope, max_position_embeddings=64)
    short, long = random_prompt(24, 1)[0].tolist(), random_prompt(63, 2)[0].tolist()
    texts = (short, long, [*short, 5], [*long, 5])
    dense = [model(torch.tensor([ids]), use_cache=False).logits[0, -1] for ids in texts]
    with attached(model, "dense") as handle:
        batch = Batch(model)
        logits = [*batch.add([short, long]), *batch.step([5, 5])]
        torch.testing.assert_close(torch.stack(logits), torch.stack(dense))
        refused(f"has 65 tokens; the model's {kind} RoPE has other frequencies beyond", batch.step, [5, 5])
        refused("a prompt has 65 tokens", Batch(model).add, [short, [*long, 5, 5]])
        requests = [Request(i, "", tuple(ids)) for i, ids in enumerate((short, long[:62]))]
        refused("answer has 65 tokens", support.engine(handle, [].append, limit=Limit(4)).run, requests)


def fast_tokenizer(single, pre_tokenizer):
    words = ["<unk>", "<s>", "</s>", "[gMASK]", "a", "b", "\u2581a", "\u2581b"]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizer
    special = [(word, raw.token_to_id(word)) for word in words[1:4]]
    raw.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    raw.add_special_tokens(words[1:4])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize(
    ("single", "start"),
    [("$A", []), ("<s> $A", [1]), ("$A </s>", []), ("<s> $A </s>", [1]), ("[gMASK] <s> $A", [3, 1])],
)
@pytest.mark.parametrize("marks", [False, True])
def test_a_plain_prompt_begins_as_the_tokenizer_begins_texts(single, start, marks):
    """Also in a vocabulary that marks the beginnings of words; what a tokenizer puts behind texts would end them."""
    splits = pre_tokenizers.Metaspace(prepend_scheme="first") if marks else pre_tokenizers.WhitespaceSplit()
    tokenizer = fast_tokenizer(single, splits)
    words = [6, 7] if marks else [4, 5]
    text = prompt_text(tokenizer, Problem("p", "1", prompt="a b"))
    assert encode(tokenizer, text) == start + words
    assert tokenizer("a b")["input_ids"][: len(start) + 2] == start + words
    assert prompt_text(tokenizer, Problem("p", "1", prompt=text)) == text, "never twice"
    assert encode(tokenizer, beginning(tokenizer).rstrip() or "a") == (start or words[:1])
    question = Problem("p", "1", messages=({"role": "user", "content": "x"},))
    refused("no chat template", prompt_text, tokenizer, question)
    tokenizer.chat_template = "{{ raise_exception('no system turns') }}"
    refused("template refuses the messages of problem p: no system turns", prompt_text, tokenizer, question)
    tokenizer.chat_template = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"
    assert prompt_text(tokenizer, question) == "x"
    for role in ("human", "system"):
        unknown = Problem("p", "1", messages=({"role": role, "content": "y"}, *question.messages))
        refused(f"leaves out a turn of problem p, whose roles are {role}, user", prompt_text, tokenizer, unknown)


def test_the_space_at_the_beginning_of_an_answer_is_kept():
    """Llama 2's decoder leaves out a space at the beginning of a text: the indent of a function's body."""
    prompt, body = "def f():\n", "    return 1\n"
    letters = sorted(set((prompt + body).replace(" ", "▁")))
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *letters, "▁▁", "▁▁▁▁"]
    tokenizer = LlamaTokenizer(
        vocab={token: i for i, token in enumerate(vocabulary)}, merges=[("▁", "▁"), ("▁▁", "▁▁")]
    )
    given = encode(tokenizer, prompt)
    tokens = [*encode(tokenizer, prompt + body)[len(given) :], tokenizer.eos_token_id]
    assert tokenizer.decode(tokens[:-1]) == body[1:]
    answer = Generation.of(Request("k", prompt, tuple(given)), tokens, {tokenizer.eos_token_id}, tokenizer, 0.0, {})
    assert answer.completion == body
    pieces = [tokenizer.convert_tokens_to_ids(piece) for piece in ("▁▁", "▁▁", "r", "e")]
    assert tokenizer.decode(pieces) == "   re" and text_of(pieces, tokenizer) == "    re"
    assert text_of([*pieces, len(tokenizer) + 5], tokenizer) == "    re", "a token of the model alone has no text"
