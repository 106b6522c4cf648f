"""Dense attention of the newest tokens, against its definition."""

import pytest
import torch
from transformers import DynamicCache

import seergate
from seergate.decode.step import newest_tokens_attention
from tests.support.models import prompt, tiny_model
from tests.support.steps import step


def naive(q, k, v, ends, scale):
    """``q [B, H, S, D]``: each new token of each row and head by itself, in float64."""
    batch, heads, new, _ = q.shape
    output = torch.zeros(batch, new, heads, v.shape[-1], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(new):
                seen = ends[b] - new + i + 1
                kv = h // (heads // k.shape[1])
                weights = (k[b, kv, :seen].double() @ q[b, h, i].double() * scale).softmax(0)
                output[b, i, h] = weights @ v[b, kv, :seen].double()
    return output


@pytest.mark.parametrize("group", [1, 4, 5, 7, 8])
@pytest.mark.parametrize(("new", "ends"), [(2, [2]), (5, [63, 63]), (3, [40, 3, 17]), (17, [17, 100])])
def test_against_the_definition(group, new, ends):
    kv_heads, width, value_width, capacity = 2, 16, 8, 128
    batch, heads = len(ends), kv_heads * group
    q = torch.randn(batch, heads, new, width)
    k, v = torch.randn(batch, kv_heads, capacity, width), torch.randn(batch, kv_heads, capacity, value_width)
    expected = naive(q, k, v, ends, width**-0.5)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        given = (x.to(dtype) for x in (q, k, v))
        output = newest_tokens_attention(step(*given, ends, new, sm_scale=width**-0.5))
        assert output.dtype == dtype
        torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize(("family", "options"), [("gemma2", {"attn_logit_softcapping": 1.0}), ("gpt_oss", {})])
def test_soft_caps_and_sinks_of_a_dense_pass_are_the_models_own(family, options):
    model, ids = tiny_model(family, **options), prompt(30)
    with seergate.attached(model, "quest", token_budget=4096, block_size=8) as handle:
        model(ids[:, :26], past_key_values=(cache := DynamicCache(config=model.config)))
        with handle.passes.forced("dense"):
            logits = model(ids[:, 26:], past_key_values=cache).logits
    torch.testing.assert_close(logits, model(ids).logits[:, 26:], rtol=1e-4, atol=1e-4)
