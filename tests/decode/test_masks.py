"""Masks of passes over a filled cache and masks of four dimensions: honoured, or refused."""

import pytest
import torch
from transformers import DynamicCache

import seergate
from tests.decode.test_decode import gates
from tests.support.models import prompt
from tests.support.running import refused


def turn(model, hide, new):
    """Logits of ``new`` tokens per row after 40, of which the mask hides some in row 0."""
    mask = torch.ones(2, 40 + new, dtype=torch.long)
    mask[0, hide] = 0
    cache, positions = DynamicCache(), (mask.cumsum(1) - 1)[:, -new:]
    model(torch.cat((prompt(40, 1), prompt(40, 2))), past_key_values=cache)
    ids = torch.cat((prompt(new, 3), prompt(new, 4)))
    return model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits[:, -1]


@torch.no_grad()
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_mask_may_hide_the_newest_cached_tokens_whatever_arrives(model, monkeypatch, new, implementation):
    monkeypatch.setattr(model.config, "_attn_implementation_internal", implementation)
    newest, earlier = slice(30, 40), slice(5, 6)
    want = turn(model, newest, new)
    for method, storage in ((gates(model), None), ("kv4bit", None), (gates(model), seergate.Paging())):
        options = {} if method == "kv4bit" else {"token_budget": 4096}
        with seergate.attached(model, method, storage=storage, **options):
            if method == "kv4bit" or storage is not None:
                refused("cannot take back", turn, model, newest, new)
            else:
                torch.testing.assert_close(turn(model, newest, new), want, rtol=1e-4, atol=1e-4)
            refused("hides tokens of row 0", turn, model, earlier, new)


@torch.no_grad()
def test_a_mask_that_shows_padding_again_is_refused(model):
    with seergate.attached(model, gates(model), token_budget=4096):
        cache = DynamicCache()
        model(prompt(40), attention_mask=(torch.arange(40) >= 5).long()[None], past_key_values=cache)
        causal = torch.ones(1, 1, 1, 41, dtype=torch.bool)
        refused("shows tokens that were padding", model, prompt(1), attention_mask=causal, past_key_values=cache)


PADDED = torch.arange(50) >= 7
CAUSAL = torch.ones(50, 50, dtype=torch.bool).tril()
DIAGONAL = torch.eye(50, dtype=torch.bool)
SPLIT = CAUSAL & ~((torch.arange(50) >= 20)[:, None] & (torch.arange(50) < 20))
TREE = CAUSAL & ~((torch.arange(50) == 49)[:, None] & (torch.arange(50) == 48))
OTHERS = (SPLIT, TREE, torch.ones_like(CAUSAL), CAUSAL.flip(1))


def additive(mask):
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


@torch.no_grad()
@pytest.mark.parametrize("mask", [CAUSAL, CAUSAL & PADDED | DIAGONAL, CAUSAL & PADDED | ~PADDED[:, None]])
@pytest.mark.parametrize("form", [torch.Tensor.bool, additive])
def test_4d_masks_of_padding_are_those_of_two_dimensions(model, mask, form):
    """Whatever the rows of padding see, without which attention would be undefined."""
    logits = []
    real = mask[-1].long()[None]
    positions = (real.cumsum(1) - 1).clamp(min=0)
    with seergate.attached(model, gates(model), token_budget=4096):
        for given in (real, form(mask)[None, None]):
            cache = DynamicCache()
            model(prompt(50), attention_mask=given, position_ids=positions, past_key_values=cache)
            later = {"attention_mask": torch.cat((real, torch.ones_like(real[:, :1])), 1)}
            later["position_ids"] = positions[:, -1:] + 1
            logits.append(model(prompt(1), past_key_values=cache, **later).logits)
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("method", ["quest", "h2o", "dense"])
def test_other_4d_masks_are_refused(model, method):
    """Also biases and masks of single heads."""
    bias, leak, heads = additive(CAUSAL)[None, None], additive(CAUSAL)[None, None], CAUSAL.repeat(1, 4, 1, 1)
    bias[..., 10, 3], leak[..., 3, 10], heads[0, 2, 30, 5] = -1.0, -1.0, False
    others = [form(mask)[None, None] for mask in OTHERS for form in (torch.Tensor.bool, additive)]
    for mask in (bias, leak, heads, *others):
        with seergate.attached(model, method):
            refused("4D attention_mask is not that of a te", model, prompt(50), mask, past_key_values=DynamicCache())
