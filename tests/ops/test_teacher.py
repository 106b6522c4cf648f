"""Block targets against numbers worked out by hand, the reference, and their own definition."""

import pytest
import torch

from seergate import ops
from seergate.ops import reference
from seergate.ops.torch_impl import teacher
from tests.support.op_inputs import Pack, cu_seqlens, relative

BOTH = pytest.mark.parametrize(
    "block_targets", [reference.block_targets, ops.block_targets], ids=["reference", "torch"]
)

HEAD_0 = [0.1, 0.2, 0.05, 0.05, 0.2, 0.4]
HEAD_1 = [0.3, 0.1, 0.2, 0.1, 0.1, 0.2]


def two_heads_with_these_probabilities(dtype=torch.float64):
    """Row 5 attends with exactly HEAD_0 and HEAD_1: its queries pick a coordinate, keys hold log-probabilities."""
    k = torch.tensor([HEAD_0, HEAD_1], dtype=dtype).log().T[:, None]
    q = torch.eye(2, dtype=dtype).expand(6, 2, 2)
    return q, k, cu_seqlens([6])


@BOTH
def test_worked_example(block_targets):
    q, k, cu = two_heads_with_these_probabilities()
    targets = block_targets(q, k, cu, 2, 1.0)
    # Block maxima .2 .05 .4 and .3 .2 .2; over the group .3 .2 .4; without the row's own block, normalised: .6 .4
    torch.testing.assert_close(targets[5, 0], torch.tensor([0.6, 0.4, 0.0], dtype=torch.float64))
    # Row 3 sees four keys: head 0 has .1 .2 .05 .05 of .4, one past block, so its share is 1.
    torch.testing.assert_close(targets[3, 0], torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64))
    assert not targets[:2].any()


@BOTH
def test_sink_enters_the_denominator_before_the_maximum_over_heads(block_targets):
    q, k, cu = two_heads_with_these_probabilities()
    # A sink of log 3 makes head 0's probabilities a quarter of what they were: .05 .0125 | head 1 unchanged: .3 .2;
    # or those of head 1: .2 .05 | .075 .05
    for weights, share in (([3.0, 0.0], 0.6), ([0.0, 3.0], 0.8)):
        targets = block_targets(q, k, cu, 2, 1.0, sinks=torch.tensor(weights, dtype=torch.float64).log())
        torch.testing.assert_close(targets[5, 0], torch.tensor([share, 1 - share, 0.0], dtype=torch.float64))


@BOTH
def test_softcap(block_targets):
    # One head, scores 0 and 4 in two past blocks of one token, 1 for the row itself; cap 2.
    k = torch.tensor([0.0, 4.0, 1.0], dtype=torch.float64)[:, None, None]
    q = torch.ones(3, 1, 1, dtype=torch.float64)
    targets = block_targets(q, k, cu_seqlens([3]), 1, 1.0, softcap=2.0)
    capped = 2 * torch.tanh(torch.tensor([0.0, 2.0], dtype=torch.float64))
    torch.testing.assert_close(targets[2, 0, :2], capped.softmax(0))


@BOTH
def test_query_head_h_belongs_to_kv_head_h_div_group(block_targets):
    # Heads 0, 1 -> KV head 0; heads 2, 3 -> KV head 1. Only head 1 looks at block 0, only head 2 at block 1.
    q = torch.zeros(3, 4, 2, dtype=torch.float64)
    q[2, 1, 0] = q[2, 2, 1] = 10.0
    k = torch.eye(3, 2, dtype=torch.float64)[:, None].expand(3, 2, 2)
    targets = block_targets(q, k, cu_seqlens([3]), 1, 1.0)[2]
    assert targets[0, 0] > 0.6 and targets[1, 1] > 0.6


class TestAttentionWithBlockTargets:
    @pytest.mark.parametrize("group", [1, 4, 5, 7, 8])
    @pytest.mark.parametrize("size", [1, 8, 16])
    def test_equals_reference(self, group, size):
        pack = Pack.random([37, 0, 1, 8, 9, 50], block_size=size, group=group)
        v = torch.randn(*pack.k.shape[:2], 5, dtype=torch.float64)
        sinks = torch.randn(2 * group, dtype=torch.float64)
        for options in ({}, {"sm_scale": 0.7}, {"sinks": sinks}, {"softcap": 3.0}, {"sinks": sinks, "softcap": 3.0}):
            want = reference.attention_with_block_targets(pack.q, pack.k, v, pack.cu, size, **options)
            got = ops.attention_with_block_targets(pack.q, pack.k, v, pack.cu, size, **options)
            for a, b in zip(got, want, strict=True):
                assert a.dtype == torch.float64
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)

    @pytest.mark.parametrize("run", [reference, ops], ids=["reference", "torch"])
    def test_output_is_attention_and_targets_belong_to_it(self, run):
        pack = Pack.random([40], block_size=8, group=3)
        v = torch.randn(40, 2, 7, dtype=torch.float64)
        got = run.attention_with_block_targets(pack.q, pack.k, v, pack.cu, 8)
        q, k, values = (x.transpose(0, 1)[None] for x in (pack.q, pack.k, v))
        want = torch.nn.functional.scaled_dot_product_attention(q, k, values, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(got.output, want[0].transpose(0, 1))
        # exp(log target) is the highest probability: with lse, found again from the scores of one row.
        scores = torch.einsum("hd,skd->hks", pack.q[39], pack.k)[torch.arange(6), torch.arange(6) // 3] / 4
        best = (scores - got.lse[39][:, None]).exp()[:, :32].unflatten(1, (4, 8)).amax(2).unflatten(0, (2, 3)).amax(1)
        torch.testing.assert_close(got.log_targets[39].exp(), torch.nn.functional.pad(best, (0, 1)))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_narrow_inputs(self, dtype):
        pack = Pack.random([70, 33], dtype=dtype)
        v = torch.randn(103, 2, 16).to(dtype)
        got = ops.attention_with_block_targets(pack.q, pack.k, v, pack.cu, 8)
        exact = pack.to(torch.float64)
        want = reference.attention_with_block_targets(exact.q, exact.k, v.double(), exact.cu, 8)
        assert got.output.dtype == dtype and got.lse.dtype == got.log_targets.dtype == torch.float32
        assert relative(got.output, want.output) < max(1e-5, torch.finfo(dtype).eps)
        assert relative(got.lse, want.lse) < 1e-5
        assert relative(got.log_targets.exp(), want.log_targets.exp()) < 1e-5

    def test_no_gradient_reaches_the_teacher(self):
        pack = Pack.random([30])
        q, k = pack.q.requires_grad_(), pack.k.requires_grad_()
        assert not any(x.requires_grad for x in ops.attention_with_block_targets(q, k, k, pack.cu, 8))


def test_targets_survive_probabilities_that_underflow():
    # The row's own key takes everything: past probabilities are e^-200 and e^-201, zero in fp32, yet their ratio is e.
    k = torch.tensor([0.0, -1.0, 200.0])[:, None, None]
    q = torch.ones(3, 1, 1)
    for op in (ops.block_targets, reference.block_targets):
        got = op(q, k, cu_seqlens([3]), 1, 1.0)[2, 0, :2]
        torch.testing.assert_close(got, torch.tensor([0.0, -1.0]).softmax(0))


def test_many_small_chunks_change_nothing(monkeypatch):
    pack = Pack.random([150, 91], block_size=16, group=3)
    want = ops.block_targets(pack.q, pack.k, pack.cu, 16)
    monkeypatch.setattr(teacher, "CHUNK_BYTES_CPU", 1)
    monkeypatch.setattr(teacher, "MIN_ROWS", 7)  # chunks that straddle block borders
    torch.testing.assert_close(ops.block_targets(pack.q, pack.k, pack.cu, 16), want)
