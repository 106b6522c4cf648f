"""What people do around `generate`: threads, copies of a cache, inference mode, wrappers, cancelling, odd loops."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import DynamicCache, GenerationConfig, PreTrainedTokenizerFast, SynthIDTextWatermarkingConfig

import seergate
from seergate import GateBank, GateConfig, methods
from seergate.errors import SeergateError
from tests.models import left_padded, prompt, tiny_model

LOSSLESS = {"token_budget": 32, "correction": seergate.Lossless(4)}


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3")


def gates(model):
    torch.manual_seed(0)
    bank = GateBank.for_model(model, GateConfig(block_size=8, gate_dim=16))
    for parameter in bank.parameters():
        parameter.data.normal_()
    return bank


@pytest.mark.parametrize("place", ["self_attn.q_proj", "mlp"])
def test_a_second_thread_is_refused_and_the_first_goes_on(model, place):
    """What a module catches on the way would be mixed up. One that comes later, or after an error, is welcome."""
    own, arrived, go, found = copy.deepcopy(model), threading.Event(), threading.Event(), {}

    def wait(*_):
        if threading.current_thread() is not threading.main_thread():
            arrived.set()
            go.wait(60)

    def run(number):
        try:
            found[number] = own.generate(prompt(50, number), max_new_tokens=4)
        except SeergateError as error:
            found[number] = error

    with seergate.attached(own, gates(model), token_budget=32):
        want = own.generate(prompt(50, 1), max_new_tokens=4)
        hook = own.model.layers[0].get_submodule(place).register_forward_pre_hook(wait)
        first = threading.Thread(target=run, args=(1,))
        first.start()
        assert arrived.wait(60)
        run(2)
        hook.remove()
        go.set()
        first.join()
        assert "two threads run this model at once" in str(found[2])
        assert torch.equal(found[1], want)
        later = threading.Thread(target=run, args=(1,))
        later.start()
        later.join()
        assert torch.equal(found[1], want)


@pytest.mark.parametrize("method", ["gates", "quest", "h2o", "dense"])
def test_a_copied_cache_goes_on_and_shares_the_gates(model, method):
    ids, options = prompt(60), {} if method == "dense" else {"token_budget": 32}
    longer = torch.cat((ids, prompt(1, 3)), 1)
    with seergate.attached(model, gates(model) if method == "gates" else method, **options) as handle:

        def begun():
            cache = DynamicCache()
            model(ids, past_key_values=cache)
            return cache

        want = model.generate(longer, past_key_values=begun(), max_new_tokens=20)
        kept = begun()
        for _ in range(2):
            copied = copy.deepcopy(kept)
            assert copied.layers[1].method is handle.method
            assert torch.equal(model.generate(longer, past_key_values=copied, max_new_tokens=20), want)
        assert kept.get_seq_length() == 60


def test_a_copied_model_has_its_own_method(model):
    attached = copy.deepcopy(model)
    seergate.attach(attached, gates(model), token_budget=32)
    attached.generate(prompt(60), max_new_tokens=2, cache_implementation="static")
    copied = copy.deepcopy(attached)
    assert seergate.handle_of(copied).method is not seergate.handle_of(attached).method
    assert torch.equal(copied.generate(prompt(60), max_new_tokens=8), attached.generate(prompt(60), max_new_tokens=8))


@pytest.mark.parametrize("method", ["gates", "quest", "h2o", "kv4bit"])
def test_inference_mode_may_end_between_two_calls(model, method):
    ids, options = prompt(60), {} if method in ("dense", "kv4bit") else {"token_budget": 32}
    with seergate.attached(model, gates(model) if method == "gates" else method, **options):

        def texts(first):
            cache = DynamicCache()
            with first:
                model(ids, past_key_values=cache)
                model(prompt(1, 3), past_key_values=cache)
            with torch.no_grad():
                steps = [model(prompt(1, step), past_key_values=cache).logits for step in range(20)]
            return torch.stack(steps)

        assert torch.equal(texts(torch.inference_mode()), texts(torch.no_grad()))


EVERYWHERE = {
    "plain": {},
    "lossless": {"correction": seergate.Lossless(4)},
    "rectified": {"correction": seergate.Rectify(4)},
    "offloaded": {"storage": seergate.Offload(1 << 20)},
    "paged": {"storage": seergate.Paging()},
    "static": {"cache_implementation": "static"},
    "assisted": {"prompt_lookup_num_tokens": 3},
    "beams": {"num_beams": 2},
}


@pytest.mark.parametrize(
    ("way", "method"), [*((way, "gates") for way in EVERYWHERE), ("paged", "quest"), ("static", "quest")]
)
def test_the_whole_of_generate_in_inference_mode(model, method, way):
    options = dict(EVERYWHERE[way])
    asked = {name: options.pop(name) for name in list(options) if name in ("cache_implementation", "num_beams")}
    asked |= {name: options.pop(name) for name in list(options) if name == "prompt_lookup_num_tokens"}
    if method != "gates":
        options["block_size"] = 8
    with seergate.attached(
        copy.deepcopy(model), gates(model) if method == "gates" else method, token_budget=32, **options
    ) as handle:
        want = handle.model.generate(prompt(60), max_new_tokens=40, **asked)
        with torch.inference_mode():
            assert torch.equal(handle.model.generate(prompt(60), max_new_tokens=40, **asked), want)
        assert torch.equal(handle.model.generate(prompt(60), max_new_tokens=40, **asked), want)


@pytest.mark.parametrize("method", ["gates", "quest", "dense"])
def test_inference_mode_around_static_steps(model, method):
    options = {} if method == "dense" else {"token_budget": 32}
    with seergate.attached(copy.deepcopy(model), gates(model) if method == "gates" else method, **options) as handle:
        run = lambda: handle.model.generate(prompt(60), max_new_tokens=8, cache_implementation="static")  # noqa: E731
        with torch.inference_mode():
            first = run()
        assert handle.stats()["steps"] > 0
        assert torch.equal(run(), first)


@pytest.mark.parametrize(
    "options", [{"token_budget": 4096}, {**LOSSLESS, "token_budget": 4096}], ids=["gate", "lossless"]
)
def test_a_later_mask_may_hide_what_a_row_said_after_its_end(model, options):
    """Batched chat on one cache: a row that ends early is padded, and the next turn hides the padding."""
    batch = left_padded([prompt(30, 1), prompt(20, 2)])
    end = int(model.generate(**batch, max_new_tokens=12)[0, 34])

    def logits():
        cache = DynamicCache()
        said = model.generate(**batch, max_new_tokens=12, eos_token_id=end, past_key_values=cache)
        ended = said[:, 30:] == end
        real = ((ended.cumsum(1) - ended.long()) == 0).long()
        assert not real.all()
        turn = prompt(6, 9).expand(2, -1)
        out = model.generate(
            input_ids=torch.cat((said, turn), 1),
            attention_mask=torch.cat((batch["attention_mask"], real, torch.ones_like(turn)), 1),
            max_new_tokens=10,
            past_key_values=cache,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return torch.stack(out.logits)

    want = logits()
    with seergate.attached(model, gates(model), **{**options, "token_budget": 4096}):
        torch.testing.assert_close(logits(), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("method", "hidden", "message"),
    [("quest", 40, "hides tokens of row 1 .* shows later ones"), ("h2o", 59, "under 'h2o' cannot take back")],
)
def test_other_masks_over_what_is_there_are_refused(model, method, hidden, message):
    ids, mask = prompt(60).expand(2, -1), torch.ones(2, 70)
    mask[1, hidden] = 0
    with seergate.attached(model, method, token_budget=32):
        cache = DynamicCache()
        model(ids, past_key_values=cache)
        with pytest.raises(SeergateError, match=message):
            model(prompt(10).expand(2, -1), attention_mask=mask, past_key_values=cache)


def test_rectification_where_the_model_makes_the_cache(model):
    def said(**cache):
        out = model(prompt(60), **cache)
        steps = []
        for step in range(12):
            out = model(prompt(1, step), past_key_values=out.past_key_values)
            steps.append(out.logits)
        return torch.stack(steps)

    with seergate.attached(model, "resa", token_budget=32, rectify_every=4) as handle, torch.no_grad():
        assert torch.equal(said(), said(past_key_values=DynamicCache()))
        assert handle.stats()["rectification"]["passes"] > 0


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_lossless_refuses_angles_that_depend_on_the_pass(kind):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 64}
    model = tiny_model("qwen3", rope_parameters=rope, max_position_embeddings=64)
    with pytest.raises(SeergateError, match=f"{kind} RoPE"):
        seergate.attach(model, gates(model), **LOSSLESS)


def test_lossless_leaves_tokens_that_a_cancelled_request_did_not_say(model):
    class Cancelled(Exception):
        pass

    class Streamer:
        count = 0

        def put(self, value):
            self.count += 1
            if self.count == 8:  # the prompt, then tokens
                raise Cancelled

        def end(self):
            pass

    lengths = []
    for options in ({"token_budget": 4096}, {**LOSSLESS, "token_budget": 4096}):
        with seergate.attached(model, gates(model), **options):
            cache = DynamicCache()
            with pytest.raises(Cancelled):
                model.generate(prompt(60), max_new_tokens=20, past_key_values=cache, streamer=Streamer())
            lengths.append(cache.get_seq_length())
    assert lengths[0] == lengths[1]


def test_lossless_with_a_watermark_that_remembers(model):
    def said():
        config = SynthIDTextWatermarkingConfig(keys=[1, 2, 3, 4, 5], ngram_len=3)
        return model.generate(prompt(60), max_new_tokens=24, watermarking_config=config)

    want = said()
    with seergate.attached(model, gates(model), **LOSSLESS):
        assert torch.equal(said(), want)


def test_lossless_calls_what_stood_in_for_generate_and_gives_it_back(model):
    own, calls, stock = copy.deepcopy(model), [], model.generate(prompt(60), max_new_tokens=3)
    plain = own.generate

    def mine(*args, **kwargs):
        calls.append(1)
        return plain(*args, **kwargs)

    own.generate = mine
    with seergate.attached(own, gates(model), **LOSSLESS):
        assert torch.equal(own.generate(prompt(60), max_new_tokens=3), stock)
    assert calls == [1] and own.generate is mine


def test_lossless_leaves_other_loops_to_transformers(model):
    with pytest.raises(Exception) as plain:
        model.generate(prompt(60), max_new_tokens=3, penalty_alpha=0.6, top_k=4)
    with seergate.attached(model, gates(model), **LOSSLESS), pytest.raises(type(plain.value)) as lossless:
        model.generate(prompt(60), max_new_tokens=3, penalty_alpha=0.6, top_k=4)
    assert str(lossless.value) == str(plain.value)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_prompts_are_known_through_peft(model):
    peft = pytest.importorskip("peft")
    base = copy.deepcopy(model)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(base, config).eval()
    for attached in (wrapped, wrapped.get_base_model()):
        with seergate.attached(attached, gates(model), token_budget=32) as handle:
            wrapped.generate(input_ids=prompt(60), max_new_tokens=6, prefill_chunk_size=1)
            assert handle.stats()["steps"] == 5
    assert "_prefill" not in vars(base)


def test_a_cache_that_is_no_list_of_layers_is_said_to_be_dense(model):
    """What transformers' continuous batching passes to the layers in the place of a cache."""
    with seergate.attached(model, gates(model), token_budget=32) as handle, pytest.warns(match="own paged cache"):
        model(prompt(60), use_cache=False, cache=object())
    assert handle.stats()["steps"] == 0


@pytest.mark.soak
def test_pages_of_transformers_are_said_to_be_dense(model):
    with seergate.attached(model, gates(model), token_budget=32), pytest.warns(match="own paged cache"):
        model.generate(prompt(60), max_new_tokens=4, cache_implementation="paged", eos_token_id=-1)


def test_memory_is_shared_by_layers_that_have_gates(model):
    bank = gates(model).subset([1])
    assert methods.Gate(bank=bank, token_budget=32).selects_in(1)
    assert not methods.Gate(bank=bank, token_budget=32).selects_in(0)
    dense = methods.Gate(bank=gates(model), token_budget=32, dense_layers=(0,))
    least = {}
    for name, method in {"gate": methods.Gate(bank=bank, token_budget=32), "dense layer": dense}.items():
        with seergate.attached(model, method, storage=seergate.Offload(1)), pytest.raises(SeergateError) as refused:
            model.generate(prompt(60), max_new_tokens=4)
        least[name] = str(refused.value)
    assert least["gate"] == least["dense layer"]


def test_a_full_disk_is_told_before_anything_is_written(model, monkeypatch):
    """Pages of a mapped file that find no place later would end the process."""

    def full(file, begin, count):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full, raising=False)
    with (
        seergate.attached(model, gates(model), token_budget=32, storage=seergate.Offload(1 << 20)),
        pytest.raises(SeergateError, match="has no room for .* bytes of keys and values"),
    ):
        model.generate(prompt(60), max_new_tokens=4)


def test_lossless_stops_at_strings_and_needs_no_more_than_others_for_it():
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
        with seergate.attached(model, gates(model), **LOSSLESS):
            assert torch.equal(model.generate(prompt(60), *positional, tokenizer=tokenizer, **asked), want)
            with pytest.raises(ValueError, match="tokenizer"):
                model.generate(prompt(60), *positional, **asked)
    assert kept.stop_strings == [word]
