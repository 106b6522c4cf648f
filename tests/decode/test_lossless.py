"""Lossless decoding: whatever the method drafts, the text is the dense model's."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

import seergate
from seergate import GateBank, Lossless, SeergateError
from seergate.decode.lossless import weights_read
from seergate.eval.tasks.chain_sum import make_problem
from seergate.models.loading import load_base
from seergate.paths import shipped
from seergate.pretrained import load_tokenizer
from tests.decode.test_decode import BLOCK, gates, selector
from tests.support import evaluation as support
from tests.support.chi_square import looks_like
from tests.support.models import left_padded, prompt, tiny_model


def test_200_greedy_requests_say_what_the_dense_model_says():
    """Any selector, budget, block size and draft length; alone and in padded batches; some end early."""
    models = [tiny_model("qwen3", seed=seed, eos_token_id=end) for seed, end in ((0, None), (1, 7), (2, 40))]
    draw, requests, accepted, tried = random.Random(0), 0, 0, 0
    while requests < 200:
        model = draw.choice(models)
        rows = [prompt(draw.randint(1, 70), draw.randrange(10**6)) for _ in range(draw.choice((1, 1, 2, 4, 6)))]
        batch = left_padded(rows)
        new = draw.randint(1, 14)
        block_size = draw.choice((8, 16))
        method = selector(
            model,
            draw.choice(("gate", "quest", "oracle", "random")),
            block_size * draw.choice((2, 3, 4, 6)),
            block_size,
        )
        correction = Lossless(draw.choice((1, 2, 3, 5, 8)))
        expected = model.generate(**batch, max_new_tokens=new)
        with seergate.attached(model, method, correction=correction) as handle:
            assert torch.equal(model.generate(**batch, max_new_tokens=new), expected), (method, len(rows), new)
            lossless = handle.correction
            accepted, tried = accepted + lossless.accepted, tried + lossless.tried
        requests += len(rows)
    assert 0.1 * tried < accepted < 0.95 * tried, "drafts must be neither always right nor always wrong"


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "gemma2", "llama", "hunyuan_v1_dense"])
def test_families_whose_layers_differ(family):
    """Sliding windows that are full, attention sinks, capped scores, keys that cannot be re-positioned."""
    model = tiny_model(family)
    for batch in ({"input_ids": prompt(45)}, left_padded([prompt(50, 1), prompt(28, 2)])):
        expected = model.generate(**batch, max_new_tokens=24)
        for draft in (1, BLOCK):
            method = selector(model, "oracle", 2 * BLOCK)
            with seergate.attached(model, method, correction=Lossless(draft)) as handle:
                assert torch.equal(model.generate(**batch, max_new_tokens=24), expected)
                assert handle.stats()["lossless"]["cycles"] > 2


def test_a_cache_that_cannot_take_tokens_back_decodes_densely():
    """A static window drops what leaves it: nothing is drafted, and the text is the dense model's all the same."""
    model = tiny_model("gemma3_text")
    expected = model.generate(input_ids=prompt(45), max_new_tokens=8)
    with seergate.attached(model, selector(model, "oracle", 16), correction=Lossless(3)) as handle:
        found = model.generate(input_ids=prompt(45), max_new_tokens=8, cache_implementation="static")
        assert handle.stats()["lossless"]["cycles"] == 0
    assert torch.equal(found, expected)


class _Texts(BaseStreamer):
    """Keeps what it gets; may fail once it has so many pieces."""

    def __init__(self, most=None):
        self.pieces, self.ended, self.most = [], False, most

    def put(self, value):
        self.pieces.append(value)
        if len(self.pieces) == self.most:
            raise ArithmeticError

    def end(self):
        self.ended = True


class _AfterToken(StoppingCriteria):
    """Ends a row after a token that came in the model's own words."""

    def __init__(self, token, begin):
        self.token, self.begin = token, begin

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, self.begin :] == self.token).any(1)


def test_everything_that_generate_offers(model):
    model.generation_config.pad_token_id = 0
    batch = left_padded([prompt(40, 1), prompt(33, 2)])
    said = model.generate(**batch, max_new_tokens=20)[0, 40:]
    asked = [
        {"max_new_tokens": 20, "eos_token_id": [int(said[6]), 3]},
        {"max_new_tokens": 20, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"max_new_tokens": 20, "min_new_tokens": 10, "eos_token_id": int(said[2])},
        {"max_new_tokens": 1},
        {"max_new_tokens": 20, "cache_implementation": "static"},
        {"max_new_tokens": 20, "stopping_criteria": StoppingCriteriaList([_AfterToken(int(said[9]), 40)])},
        {"max_new_tokens": 12, "num_beams": 3, "num_return_sequences": 2},
        {"max_new_tokens": 6, "use_cache": False},
        {"max_new_tokens": 12, "prefill_chunk_size": 9},
        {"max_new_tokens": 8, "guidance_scale": 1.5},
        {
            "max_new_tokens": 24,
            "watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3]),
        },
    ]
    plain = [model.generate(**batch, **options) for options in asked]
    alone = {"input_ids": prompt(40, 1)}
    looked_up = model.generate(**alone, max_new_tokens=20, prompt_lookup_num_tokens=3)
    details = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    whole = model.generate(**batch, max_new_tokens=15, **details)
    states = model.generate(**alone, max_new_tokens=3, return_dict_in_generate=True, output_hidden_states=True)
    texts = _Texts()
    with seergate.attached(model, selector(model, "gate", 3 * BLOCK), correction=Lossless(3)) as handle:
        for options, expected in zip(asked, plain, strict=True):
            assert torch.equal(model.generate(**batch, **options), expected), options
        assert torch.equal(model.generate(**alone, max_new_tokens=20, prompt_lookup_num_tokens=3), looked_up)
        found = model.generate(**batch, max_new_tokens=15, **details)
        more = model.generate(**alone, max_new_tokens=3, return_dict_in_generate=True, output_hidden_states=True)
        handle.reset_stats()
        streamed = model.generate(**alone, max_new_tokens=15, streamer=texts)
        stats = handle.stats()
        copied = copy.deepcopy(model)
        assert torch.equal(copied.generate(**alone, max_new_tokens=15), streamed)
        assert handle.stats() == stats, "a copy counts for itself"
    assert torch.equal(found.sequences, whole.sequences)
    for name in ("scores", "logits"):
        assert len(found[name]) == 15
        torch.testing.assert_close(torch.stack(found[name]), torch.stack(whole[name]), rtol=2e-4, atol=2e-4)
    assert len(more.hidden_states) == len(states.hidden_states) == 3
    assert texts.ended and torch.equal(torch.cat([piece.flatten() for piece in texts.pieces]), streamed[0])
    assert stats["lossless"]["cycles"] > 3
    assert "generate" not in vars(model), "detaching gives the model its own generate back"
    assert torch.equal(model.generate(**batch, **asked[0]), plain[0])


@pytest.mark.parametrize("name", ["gate", "quest"])
def test_cache_and_method_are_left_as_a_dense_run_leaves_them(model, name):
    """Keys, values and what the method remembers are those of a dense prefill; a further turn goes on from them."""
    method = selector(model, name, 2 * BLOCK)
    question, more = prompt(37, 1), prompt(11, 2)
    plain, cache, straight = DynamicCache(), DynamicCache(), DynamicCache()
    with seergate.attached(model, method, correction=Lossless(5)):
        first = model.generate(input_ids=question, max_new_tokens=23, past_key_values=cache)
        model(input_ids=first[:, :-1], past_key_values=straight)
        for ours, dense in zip(cache.layers, straight.layers, strict=True):
            assert ours.rows.resident == dense.rows.resident == [59]
            for mine, theirs in ((ours.keys, dense.keys), (ours.values, dense.values)):
                torch.testing.assert_close(mine[:, :, :59], theirs[:, :, :59], rtol=1e-4, atol=1e-4)
            for key in {"kg", "high", "low"} & set(ours.state.rows):
                blocks = 59 // BLOCK
                torch.testing.assert_close(
                    ours.state.rows[key][:, :, :blocks], dense.state.rows[key][:, :, :blocks], rtol=1e-4, atol=1e-4
                )
        second = model.generate(input_ids=torch.cat((first, more), 1), max_new_tokens=15, past_key_values=cache)
    dense_first = model.generate(input_ids=question, max_new_tokens=23, past_key_values=plain)
    dense_second = model.generate(
        input_ids=torch.cat((dense_first, more), 1), max_new_tokens=15, past_key_values=plain
    )
    assert torch.equal(first, dense_first) and torch.equal(second, dense_second)


def test_forward_passes_outside_of_generate_are_dense(model):
    ids, logits = prompt(60), []
    for attach in (False, True):
        cache = DynamicCache()
        handle = (
            seergate.attach(model, gates(model), token_budget=2 * BLOCK, correction=Lossless()) if attach else None
        )
        model(input_ids=ids[:, :40], past_key_values=cache)
        logits.append([model(input_ids=ids[:, i : i + 1], past_key_values=cache).logits for i in range(40, 50)])
        logits[-1].append(model(input_ids=ids[:, 50:], past_key_values=cache).logits)
        if handle is not None:
            handle.detach()
    for plain, ours in zip(*logits, strict=True):
        torch.testing.assert_close(ours, plain, rtol=2e-4, atol=2e-4)


def test_counts_of_a_drafter_that_is_always_right(model):
    """A budget that covers everything drafts the dense model's own tokens: every cycle yields ``k + 1``."""
    with seergate.attached(model, gates(model), token_budget=4096, correction=Lossless(4)) as handle:
        model.generate(input_ids=prompt(30), max_new_tokens=21)  # one from the prompt, then four cycles of five
        counted = handle.stats()["lossless"]
        assert (counted["cycles"], counted["plain_steps"], counted["acceptance"]) == (4, 0, 1.0)
        assert counted["tokens_per_dense_pass"] == 5 and counted["draft_tokens"] == 4
        weights = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
        per_token = 2 * 16 * 4 * 2 * 2  # key and value, width, bytes, heads, layers
        dense = [weights + length * per_token for length in (30, 35, 40, 45)]
        # the gates' scores of covered contexts are not computed, so a draft reads what a dense pass reads
        assert counted["dense_bytes_per_token"] == pytest.approx(sum(dense) / 4)
        assert counted["bytes_per_token"] == pytest.approx(sum(dense) / 4)
        handle.reset_stats()
        assert handle.stats()["lossless"]["cycles"] == 0


@pytest.mark.parametrize("rule", [{"token_budget": 64}, pytest.param({"threshold": 0.05}, marks=pytest.mark.soak)])
def test_the_length_of_drafts_is_chosen(rule):
    """A trained model and its gates. With weights that cost nothing, as beside many long rows, it pays to draft, and
    the figures say so; with weights that cost everything, it does not."""
    model, tokenizer = load_base("checkpoints/tiny-reasoner"), load_tokenizer("checkpoints/tiny-reasoner")
    model.generation_config.do_sample = False
    question = make_problem(20, random.Random(0)).messages[:1]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    expected = model.generate(**inputs, max_new_tokens=60)
    bank, runs = GateBank.from_pretrained(shipped("checkpoints/tiny-reasoner/gates")), []
    with seergate.attached(model, bank, correction=Lossless(), **rule) as handle:
        for weights in (0, 10**12):
            handle.reset_stats()
            handle.correction.weight_bytes = weights
            assert torch.equal(model.generate(**inputs, max_new_tokens=60), expected)
            runs.append(handle.stats()["lossless"])
    light, heavy = runs
    assert light["cycles"] > light["plain_steps"] and light["acceptance"] > 0.7
    assert light["expected_speedup"] > 1.2 and light["tokens_per_dense_pass"] > 2
    assert heavy["plain_steps"] >= 58 and heavy["expected_speedup"] > 0.95


def sampled_counts(model, method, correction, ids, calls, rows, new):
    """How often each sequence of new tokens was drawn."""
    size = model.config.vocab_size
    counts = torch.zeros(size**new)
    with seergate.attached(model, method, correction=correction) as handle:
        for _ in range(calls):
            text = model.generate(
                input_ids=ids, max_new_tokens=new, do_sample=True, num_return_sequences=rows, top_k=0, temperature=2.0
            )[:, ids.shape[1] :]
            code = sum(text[:, i] * size ** (new - 1 - i) for i in range(new))
            counts += code.bincount(minlength=size**new)
        return counts, handle.stats()["lossless"]


def dense_probabilities(model, ids, new):
    """Of every sequence of new tokens, from the plain model."""
    size, texts = model.config.vocab_size, torch.empty(1, 0, dtype=torch.long)
    probabilities = torch.ones(1, dtype=torch.float64)
    for _ in range(new):
        logits = model(input_ids=torch.cat((ids.expand(len(texts), -1), texts), 1)).logits[:, -1]
        probabilities = (probabilities[:, None] * (logits.double() / 2.0).softmax(-1)).flatten()
        texts = torch.cat((texts.repeat_interleave(size, 0), torch.arange(size).repeat(len(texts))[:, None]), 1)
    return probabilities


@pytest.mark.parametrize("name", ["random", pytest.param("oracle", marks=pytest.mark.soak)])
def test_draws_of_the_next_tokens_are_dense_draws(name):
    """The second token of each pair is drafted sparsely and verified densely."""
    model = tiny_model("qwen3", vocab_size=12, pad_token_id=None, bos_token_id=None)
    ids = prompt(40) % 12
    counts, stats = sampled_counts(
        model, selector(model, name, 2 * BLOCK), Lossless(1), ids, calls=8, rows=1000, new=3
    )
    assert counts.sum() == 8_000 and stats["acceptance"] < 0.97
    wanted = dense_probabilities(model, ids, 3)
    assert looks_like(counts.view(144, 12).sum(1), wanted.view(144, 12).sum(1)), "the first two tokens"
    assert looks_like(counts.view(144, 12).sum(0), wanted.view(144, 12).sum(0)), "the third"
    # what would be wrong is seen: the drafter's own draws
    with seergate.attached(model, selector(model, name, 2 * BLOCK)):
        options = {"do_sample": True, "num_return_sequences": 1000, "top_k": 0, "temperature": 2.0}
        text = torch.cat([model.generate(input_ids=ids, max_new_tokens=2, **options) for _ in range(8)])
    pairs = (text[:, -2] * 12 + text[:, -1]).bincount(minlength=144)
    assert not looks_like(pairs, wanted.view(144, 12).sum(1))


@pytest.mark.soak
def test_longer_drafts_of_few_rows_are_dense_draws():
    """Few rows keep several drafted tokens at once."""
    model = tiny_model("qwen3", vocab_size=4, pad_token_id=None, bos_token_id=None)
    ids = prompt(30) % 4
    counts, stats = sampled_counts(
        model, selector(model, "oracle", 2 * BLOCK), Lossless(3), ids, calls=600, rows=2, new=4
    )
    assert stats["tokens_per_dense_pass"] > 1.5
    assert looks_like(counts, dense_probabilities(model, ids, 4))


class _Failing(LogitsProcessor):
    """Fails at its n-th call."""

    def __init__(self, calls):
        self.left = calls

    def __call__(self, input_ids, scores):
        self.left -= 1
        if self.left < 0:
            raise ArithmeticError
        return scores


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
@pytest.mark.parametrize("place", ["processor", "model", "streamer"])
def test_an_error_leaves_no_token_that_was_not_emitted(family, place):
    """While drafting or verifying, between layers too, or when a request is cancelled: the cache can be gone on with,
    as after a dense run.
    """
    model, question = tiny_model(family), prompt(40)
    whole, lengths = model.generate(question, max_new_tokens=24), set()
    for failing in range(3, 24, 2):
        texts = _Texts(failing if place == "streamer" else None)
        cache, options = DynamicCache(config=model.config), {}
        with seergate.attached(model, selector(model, "oracle", 2 * BLOCK), correction=Lossless(3)):
            if place == "processor":
                options["logits_processor"] = LogitsProcessorList([_Failing(failing)])
            elif place == "model":
                hook = model.model.layers[1].mlp.register_forward_pre_hook(_Failing(failing))
            with pytest.raises(ArithmeticError):
                model.generate(question, max_new_tokens=24, past_key_values=cache, streamer=texts, **options)
            if place == "model":
                hook.remove()
            emitted = torch.cat([piece.flatten() for piece in texts.pieces])
            assert torch.equal(emitted, whole[0, : len(emitted)])
            assert {int(layer.get_seq_length()) for layer in cache.layers} == {len(emitted) - 1}
            rest = 64 - len(emitted)
            assert torch.equal(model.generate(emitted[None], max_new_tokens=rest, past_key_values=cache), whole)
        lengths.add(len(emitted))
    assert len(lengths) > 3


def test_it_stops_at_strings_and_needs_no_more_than_others_for_it():
    model = tiny_model("qwen3", vocab_size=256, seed=3)
    alphabet = sorted(ByteLevel.alphabet())
    letters = Tokenizer(BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    letters.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters)
    said = tokenizer.convert_ids_to_tokens(model.generate(prompt(60), max_new_tokens=30)[0, 64:])
    word = next(letter for letter in said if letter.isascii() and letter.isprintable())
    kept = GenerationConfig.from_model_config(model.config)
    kept.update(stop_strings=[word], max_new_tokens=30, do_sample=False)
    for positional, asked in (
        ((), {"stop_strings": [word], "max_new_tokens": 30}),
        ((), {"generation_config": kept}),
        ((kept,), {}),
    ):
        want = model.generate(prompt(60), *positional, tokenizer=tokenizer, **asked)
        assert want.shape[1] < 90
        with seergate.attached(model, gates(model), token_budget=32, correction=Lossless(4)):
            assert torch.equal(model.generate(prompt(60), *positional, tokenizer=tokenizer, **asked), want)
            with pytest.raises(ValueError, match="tokenizer"):
                model.generate(prompt(60), *positional, **asked)
    assert kept.stop_strings == [word]


def test_it_leaves_other_loops_to_transformers(model):
    with pytest.raises(Exception) as plain:
        model.generate(prompt(60), max_new_tokens=3, penalty_alpha=0.6, top_k=4)
    with (
        seergate.attached(model, gates(model), token_budget=32, correction=Lossless(4)),
        pytest.raises(type(plain.value)) as lossless,
    ):
        model.generate(prompt(60), max_new_tokens=3, penalty_alpha=0.6, top_k=4)
    assert str(lossless.value) == str(plain.value)


def test_it_calls_what_stood_in_for_generate_and_gives_it_back(model):
    own, calls, stock = copy.deepcopy(model), [], model.generate(prompt(60), max_new_tokens=3)
    plain = own.generate

    def mine(*args, **kwargs):
        calls.append(1)
        return plain(*args, **kwargs)

    own.generate = mine
    with seergate.attached(own, gates(model), token_budget=32, correction=Lossless(4)):
        assert torch.equal(own.generate(prompt(60), max_new_tokens=3), stock)
    assert calls == [1] and own.generate is mine


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_it_refuses_angles_that_depend_on_the_pass(kind):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 64}
    model = tiny_model("qwen3", rope_parameters=rope, max_position_embeddings=64)
    with pytest.raises(SeergateError, match=f"{kind} RoPE"):
        seergate.attach(model, gates(model), token_budget=32, correction=Lossless(4))


def test_the_weights_of_experts_that_are_not_asked_are_not_read():
    model = tiny_model("qwen3_moe")
    config, sizes = model.config, {name: p.nbytes for name, p in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert experts > 0 and config.num_experts_per_tok < config.num_experts
    rest = sum(sizes.values()) - experts - model.get_input_embeddings().weight.nbytes
    assert weights_read(model) == rest + experts * config.num_experts_per_tok // config.num_experts


def test_refusals(model):
    bank = gates(model)
    cases = [
        (lambda: seergate.attach(model, bank, correction=1), "correction is 1; it must be a seergate.Lossless or a"),
        (lambda: Lossless(0), "draft_tokens is 0"),
        (lambda: seergate.attach(model, bank, correction=Lossless(9)), "with block_size 8 it must be at most"),
    ]
    for attempt, message in cases:
        with pytest.raises(ValueError, match=message):
            attempt()
    assert "generate" not in vars(model)
    with (
        seergate.attached(model, "oracle", block_size=8, correction=Lossless()) as handle,
        pytest.raises(SeergateError, match="lossless 'oracle' gives the dense model's tokens.*evaluate 'dense'"),
    ):
        support.engine(handle, print)
