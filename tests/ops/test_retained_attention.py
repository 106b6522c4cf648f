"""Attention to tokens that fade: the torch backend against the reference, and both against numbers."""

import pytest
import torch

from seergate import ops
from seergate.ops import reference
from tests.support.op_inputs import Pack

BOTH = pytest.mark.parametrize(
    "attend", [reference.retained_attention, ops.retained_attention], ids=["reference", "torch"]
)


def pack(lengths, group=2):
    made = Pack.random(lengths, group=group, dim=8, gate_dim=6, spread=1.0)
    sides = made.q, made.k, made.qg, -torch.randn(sum(lengths), 2, dtype=torch.float64).exp() / 10
    return [x.requires_grad_() for x in sides], made.cu


@pytest.mark.parametrize("lengths", [[1], [63], [5, 0, 40, 1, 17]])
@pytest.mark.parametrize("group", [1, 4, 5])
@pytest.mark.parametrize("options", [{}, {"window": 7}, {"softcap": 3.0}, {"sinks": 1}])
def test_against_the_reference(lengths, group, options, monkeypatch):
    monkeypatch.setattr("seergate.ops.torch_impl.retained_attention.CHUNK_BYTES_CPU", 8192)  # several chunks
    sides, borders = pack(lengths, group)
    options = options | ({"sinks": torch.linspace(-1, 2, 2 * group).double()} if "sinks" in options else {})
    results = []
    for run in (reference.retained_attention, ops.retained_attention):
        output, weight_sums = run(*sides, borders, 0.3, **options)
        squares = output.square().sum() + weight_sums.square().sum()
        results.append((output, weight_sums, *torch.autograd.grad(squares, sides)))
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    narrow = ops.retained_attention(*(x.float() for x in sides), borders, 0.3, **options)
    torch.testing.assert_close(narrow.output.double(), results[0][0], rtol=1e-4, atol=1e-5)


@BOTH
def test_an_empty_pack_is_one_as_for_ordinary_attention(attend):
    (q, k, v, log_beta), borders = pack([0])
    output, weight_sums = attend(q, k, v, log_beta, borders)
    assert output.shape == ops.packed_attention(q, k, v, borders).output.shape and weight_sums.shape == log_beta.shape


@BOTH
def test_without_fading_it_is_ordinary_attention(attend):
    (q, k, v, log_beta), borders = pack([30, 12])
    output, weight_sums = attend(q, k, v, torch.zeros_like(log_beta), borders)
    torch.testing.assert_close(output, ops.packed_attention(q.detach(), k.detach(), v.detach(), borders).output)
    assert weight_sums[:, 0].tolist() == [*range(1, 31), *range(1, 13)]


@BOTH
def test_a_token_without_worth_counts_in_its_own_row_only(attend):
    """``beta`` of 0: all to the power of 0 is 1, and nothing else; no NaN reaches the gradients."""
    (q, k, v, log_beta), borders = pack([5])
    log_beta = torch.full_like(log_beta, -torch.inf).requires_grad_()
    output, weight_sums = attend(q, k, v, log_beta, borders)
    assert (weight_sums == 1).all()
    logits = (q[4, 0] @ k[4, 0] / 8**0.5).expand(1) * torch.tensor([0, 0, 0, 0, 1])
    torch.testing.assert_close(output[4, 0], logits.softmax(0) @ v[:, 0])
    gradients = torch.autograd.grad(output.sum() + weight_sums.sum(), (q, k, v, log_beta))
    assert all(x.isfinite().all() for x in gradients) and not gradients[3].any()


@BOTH
def test_by_hand(attend):
    """Logits 2, -2, 1 of ages 2, 1, 0 and worth 1/4, 9/10, 1: a negative logit rises, as in the paper's product."""
    q = torch.tensor([[[0.0]], [[0.0]], [[1.0]]])
    k, v = torch.tensor([[[2.0]], [[-2.0]], [[1.0]]]), torch.eye(3)[:, None]
    output, weight_sums = attend(q, k, v, torch.tensor([[0.5], [0.9], [0.3]]).log(), torch.tensor([0, 3]).int(), 1.0)
    assert output[2, 0].tolist() == pytest.approx([0.363771, 0.036471, 0.599757], abs=1e-6)
    assert weight_sums[:, 0].tolist() == pytest.approx([1, 1.5, 2.15])
