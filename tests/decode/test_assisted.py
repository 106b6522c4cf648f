"""Assisted decoding with any drafter: the tokens of the slow decoder."""

import copy
from contextlib import contextmanager

import pytest
import torch
from transformers import DynamicCache

import seergate
from seergate import SeergateError, methods
from tests.decode.test_decode import BLOCK, gates
from tests.support.models import prompt, tiny_model
from tests.support.reference_decoder import ReferenceRow, Rule


@pytest.fixture(autouse=True)
def _no_logged_deprecations():
    """Instead of the one of all tests: transformers itself calls an assistant in a way that it calls deprecated."""


def slow_text(model, bank, ids, new):
    """Greedy text of the slow decoder, token by token."""
    row = ReferenceRow(model, Rule("gate", BLOCK, 2 * BLOCK), dict(bank))
    tokens = [int(row.read(ids[0].tolist())[-1].argmax())]
    while len(tokens) < new:
        tokens.append(int(row.decode(tokens[-1:])[-1].argmax()))
    return tokens


@contextmanager
def arrivals(model):
    """While it lasts, how many tokens each forward pass gets."""
    sizes = []

    def note(module, args, inputs):
        given = [inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None]
        sizes.append(given[0].shape[1])

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    yield sizes
    hook.remove()


@torch.no_grad()
@pytest.mark.parametrize("drafter", ["assistant", "lookup"])
def test_assisted_decoding_is_plain_decoding(drafter):
    """Every draft is decoded: those that come along with the prompt, those right after it, and all later ones."""
    along, after = [], []
    for seed in range(4):
        model = tiny_model("qwen3", seed=seed).double()
        bank = gates(model).double()
        ids = prompt(12, seed).repeat(1, 4) if seed % 2 else prompt(45, seed)
        options = {"prompt_lookup_num_tokens": 4}
        if drafter == "assistant":
            options = {"assistant_model": copy.deepcopy(model), "num_assistant_tokens": 5}
            for weight in options["assistant_model"].parameters():  # much of what it drafts is accepted
                weight += 0.03 * weight.std() * torch.randn_like(weight)
        with seergate.attached(model, bank, token_budget=2 * BLOCK), arrivals(model) as sizes:
            text = model.generate(input_ids=ids, max_new_tokens=24, **options)
        assert text[0, ids.shape[1] :].tolist() == slow_text(model, bank, ids, 24)
        along.append(sizes[0] > ids.shape[1])
        after.append(sizes[0] == ids.shape[1] and sizes[1] > 1)
    assert any(along)
    assert drafter == "assistant" or any(after)


def test_drafts_after_a_prompt_of_embeddings():
    """Which has no ids to count."""
    model, ids = tiny_model("qwen3"), prompt(50, 5).repeat(1, 3)
    embedded = {"inputs_embeds": model.get_input_embeddings()(ids), "max_new_tokens": 30}
    with seergate.attached(model, "quest", token_budget=2 * BLOCK, block_size=BLOCK, dense_layers=()):
        plain = model.generate(**embedded)
        with arrivals(model) as sizes:
            assert torch.equal(model.generate(**embedded, prompt_lookup_num_tokens=4), plain)
    assert sizes[0] == ids.shape[1] and max(sizes[1:]) == 5


def test_any_number_of_drafts_is_decoded():
    model, options = tiny_model("qwen3"), {"input_ids": prompt(50, 5).repeat(1, 3), "max_new_tokens": 50}
    quest = methods.Quest(token_budget=2 * BLOCK, block_size=BLOCK, dense_layers=())
    with seergate.attached(model, quest):
        plain = model.generate(**options)
        with arrivals(model) as sizes:
            assert torch.equal(model.generate(**options, prompt_lookup_num_tokens=40), plain)
    assert max(sizes[1:]) == 41
    with (
        seergate.attached(model, quest, correction=seergate.Rectify(4)),
        pytest.raises(SeergateError, match="40 tokens are to be decoded in one pass.* 32 at most"),
    ):
        model.generate(**options, prompt_lookup_num_tokens=40)


@torch.no_grad()
def test_assisted_decoding_beside_padding_and_rectification():
    model = tiny_model("qwen3").double()
    bank = gates(model).double()
    ids = prompt(12, 5).repeat(1, 4)
    padded = {
        "input_ids": torch.cat((torch.zeros(1, 3, dtype=torch.long), ids), 1),
        "attention_mask": (torch.arange(51) >= 3).long()[None],
    }
    for options in ({}, {"correction": seergate.Rectify(64)}):
        with seergate.attached(model, bank, token_budget=2 * BLOCK, **options):
            text = model.generate(**padded, max_new_tokens=24, prompt_lookup_num_tokens=4)
        assert text[0, 51:].tolist() == slow_text(model, bank, ids, 24)
        assert "_get_candidate_generator" not in vars(model)


@torch.no_grad()
@pytest.mark.parametrize("generates", [True, False])
def test_a_question_after_an_interrupted_answer_is_a_prompt(generates):
    """Also while the traceback of the error keeps the drafter alive."""
    model, ids = tiny_model("qwen3").double(), prompt(12, 5).repeat(1, 4)

    def interrupt(text, scores, **_):
        if text.shape[1] > 50:
            raise ConnectionError
        return False

    with seergate.attached(model, methods.Oracle(token_budget=2 * BLOCK, block_size=BLOCK)) as handle:
        cache = DynamicCache()
        options = {"past_key_values": cache, "max_new_tokens": 20, "prompt_lookup_num_tokens": 3}
        with pytest.raises(ConnectionError) as kept:
            model.generate(ids, **options, stopping_criteria=[interrupt])
        assert kept.tb is not None
        cache.crop(-(cache.get_seq_length() - 48))
        handle.reset_stats()
        if generates:
            model.generate(torch.cat((ids, prompt(20, 9)), 1), past_key_values=cache, max_new_tokens=1)
        else:
            model(prompt(20, 9), past_key_values=cache)
        assert handle.stats()["steps"] == 0


class Wrapper(torch.nn.Module):
    """Passes on what it lacks, as the wrappers of other libraries do."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def __getattr__(self, name):
        own = vars(self)["_modules"]
        return own[name] if name in own else getattr(own["inner"], name)


@torch.no_grad()
def test_drafts_of_a_wrapped_model():
    model, ids = tiny_model("qwen3").double(), prompt(12, 5).repeat(1, 4)
    bank = gates(model).double()
    with seergate.attached(Wrapper(model), bank, token_budget=2 * BLOCK):
        text = model.generate(ids, max_new_tokens=24, prompt_lookup_num_tokens=4)
    assert text[0, 48:].tolist() == slow_text(model, bank, ids, 24)
    assert not {"generate", "_prefill"} & set(vars(model))


@torch.no_grad()
def test_drafts_for_a_method_that_evicts_are_refused_before_the_first():
    """Even if none would be rejected, as in a text that repeats itself."""
    model = tiny_model("gemma3_text", layer_types=["full_attention"] * 2)
    ids, options = prompt(12, 5).repeat(1, 4), {"max_new_tokens": 5, "prompt_lookup_num_tokens": 3}
    plain = model.generate(ids, **options)
    with seergate.attached(model, methods.TOVA(token_budget=64)):
        with pytest.raises(SeergateError, match="takes rejected tokens back, which a method that evicts cannot"):
            model.generate(ids, **options)
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        assert not cache.layers[0].is_croppable
    assert torch.equal(model.generate(ids, **options), plain)
