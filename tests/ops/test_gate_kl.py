"""The gate's loss and gradients against hand-made numbers and float64 autograd on materialised targets."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seergate import ops
from seergate.ops import reference
from seergate.ops.torch_impl import teacher
from tests.ops.test_teacher import two_heads_with_these_probabilities
from tests.support.op_inputs import Pack, cu_seqlens, grid, relative

BOTH = pytest.mark.parametrize("gate_kl", [reference.gate_kl, ops.gate_kl], ids=["reference", "torch"])


@BOTH
def test_worked_example(gate_kl):
    q, k, cu = two_heads_with_these_probabilities()
    qg, kg = torch.zeros(6, 1, 3).double().requires_grad_(), torch.randn(3, 1, 3).double().requires_grad_()
    # Row 5: target .6 .4, gate uniform: KL = ln 2 - H(.6, .4) = .020136 nats. Rows 2..4 have one past block: KL 0
    # except row 4.
    last = {"row_start": 5 / 6, "sm_scale": 1.0}
    loss, stats = gate_kl(q, k, qg, kg, cu, 2, **last, recall_budgets=(2, 4, 6))
    assert loss.item() == pytest.approx(0.020136, abs=1e-6)
    assert stats.rows.item() == 1 and stats.kl_per_head.tolist() == pytest.approx([0.020136], abs=1e-6)
    assert stats.recall[0].item() == 0 and stats.recall[2].item() == pytest.approx(1)
    loss.backward()
    # d KL / d a = pi - p = (-.1, .1)
    expected = (0.1 * kg[1, 0] - 0.1 * kg[0, 0]).detach() / math.sqrt(3)
    torch.testing.assert_close(qg.grad[5, 0], expected)
    assert not kg.grad.any()  # qg is 0
    published, _ = gate_kl(q, k, qg, kg, cu, 2, **last, reduction="published")
    assert published.item() == pytest.approx(0.006712, abs=1e-6)  # the same over 3 blocks


@BOTH
def test_recall_by_hand(gate_kl):
    q, k, cu = two_heads_with_these_probabilities()
    qg = torch.ones(6, 1, 1).double()
    # The gate's best block has this much of the target; of equal ones the first is the best.
    for logits, share in (((1.0, 2.0), 0.4), ((2.0, 1.0), 0.6), ((1.0, 1.0), 0.6)):
        kg = torch.tensor([*logits, math.nan]).double()[:, None, None]
        _, stats = gate_kl(q, k, qg, kg, cu, 2, row_start=5 / 6, sm_scale=1.0, recall_budgets=(5,))
        assert stats.recall.item() == pytest.approx(share)


@BOTH
def test_recall_of_equal_blocks_is_that_of_the_first(gate_kl):
    q, k, qg = torch.randn(34, 2, 8).double(), torch.randn(34, 1, 8).double(), torch.zeros(34, 1, 4).double()
    cu, kg = torch.tensor([0, 34], dtype=torch.int32), torch.randn(9, 1, 4).double()
    _, stats = gate_kl(q, k, qg, kg, cu, 4, row_start=33 / 34, recall_budgets=(16,))
    targets = ops.attention_with_block_targets(q, k, k, cu, 4).log_targets[33, 0, :8].exp()
    assert stats.recall.item() == pytest.approx((targets[:3].sum() / targets.sum()).item(), rel=1e-4)


@BOTH
def test_published_weighting_by_hand(gate_kl):
    # Two segments of 6 and 2 tokens and an empty one. KL of the first is as in the worked example; the second has
    # none.
    q, k, _ = two_heads_with_these_probabilities()
    q, k = torch.cat((q, q[:2])), torch.cat((k, k[:2]))
    qg, kg = torch.zeros(8, 1, 3).double(), torch.zeros(4, 1, 3).double()
    options = {"row_start": 5 / 6, "sm_scale": 1.0}
    loss, _ = gate_kl(q, k, qg, kg, cu_seqlens([6, 0, 2]), 2, **options, reduction="published")
    assert loss.item() == pytest.approx((0.0201355 / (1 * 1 * 3) + 0.0) / 2, abs=1e-6)
    loss, stats = gate_kl(q, k, qg, kg, cu_seqlens([6, 0, 2]), 2, **options)
    assert loss.item() == pytest.approx(0.0201355, abs=1e-6) and stats.rows.item() == 1


@BOTH
def test_sink_blocks_by_hand(gate_kl):
    """Row 7 of one head: log-probabilities of four tokens' blocks, the first one a sink."""
    probabilities = torch.tensor([0.6, 0.1, 0.2, 0.1]).double()
    q = torch.ones(8, 1, 1).double()
    k = probabilities.repeat_interleave(2).log()[:, None, None]
    qg, kg = torch.ones(8, 1, 1).double(), torch.tensor([math.nan, 1.0, 2.0, math.nan]).double()[:, None, None]
    qg.requires_grad_(), kg.requires_grad_()
    options = {"row_start": 7 / 8, "sm_scale": 1.0, "sink_blocks": 1, "recall_budgets": (4, 6, 8)}
    loss, stats = gate_kl(q, k, qg, kg, cu_seqlens([8]), 2, **options)
    p, pi = (1 / 3, 2 / 3), (1 / (1 + math.e), math.e / (1 + math.e))  # over blocks 1 and 2
    assert loss.item() == pytest.approx(sum(a * math.log(a / b) for a, b in zip(p, pi, strict=True)))
    assert stats.recall[:, 0].tolist() == pytest.approx([0, 2 / 3, 1])  # sink and own block are within the budget
    loss.backward()
    assert kg.grad[:, 0, 0].tolist() == pytest.approx([0, pi[0] - p[0], pi[1] - p[1], 0])


@BOTH
@pytest.mark.parametrize(("stride", "sinks", "first"), [(1, 0, (11, 8)), (4, 1, (16, 16))])
def test_every_row_counts_at_one_shift(gate_kl, stride, sinks, first):
    """The strides of all shifts add up to all rows from ``row_start`` on; the queries of others, the keys of sinks and
    those of each segment's last block are not read.
    """
    pack = Pack.random([37, 0, 5, 24], block_size=8)
    options = {"row_start": 0.3, "recall_budgets": (24,), "sink_blocks": sinks}
    _, whole, *gradients = pack.run(gate_kl, **options)
    rows, sums = 0, [torch.zeros_like(x) for x in (whole.kl_per_head, whole.recall, *gradients)]
    for shift in range(stride, 2 * stride):
        poisoned, left_out, begin = pack.to(torch.float64), torch.ones(66, dtype=torch.bool), shift % stride
        left_out[[*range(first[0] + begin, 37, stride), *range(42 + first[1] + begin, 66, stride)]] = False
        poisoned.q[left_out] = poisoned.qg[left_out] = math.nan
        poisoned.kg[[4, 5, 8, *(0, 6) * sinks]] = math.nan
        _, stats, *part_gradients = poisoned.run(gate_kl, **options, row_stride=stride, row_shift=shift)
        rows += int(stats.rows)
        for total, part in zip(sums, (stats.kl_per_head, stats.recall, *part_gradients), strict=True):
            total += part * stats.rows
    assert rows == whole.rows == (37 - first[0]) + (24 - first[1])
    for total, want in zip(sums, (whole.kl_per_head, whole.recall, *gradients), strict=True):
        torch.testing.assert_close(total / rows, want)


def independent_kl(pack: Pack, row_start: float, sinks: int) -> torch.Tensor:
    """Probability domain, dense, one segment at a time, with autograd; shares no code with the package."""
    total, rows, block = torch.zeros(()).double(), 0, 0
    kv_heads, size = pack.k.shape[1], pack.block_size
    group = pack.q.shape[1] // kv_heads
    for start, end in zip(pack.cu[:-1].tolist(), pack.cu[1:].tolist(), strict=True):
        length, count = end - start, -(-(end - start) // size)
        q = pack.q[start:end].unflatten(1, (kv_heads, group))
        scores = torch.einsum("tkgd,skd->kgts", q, pack.k[start:end]) / math.sqrt(q.shape[-1])
        probs = scores.masked_fill(~torch.ones(length, length).tril().bool(), -torch.inf).softmax(-1)
        probs = torch.nn.functional.pad(probs, (0, count * size - length))
        best = probs.unflatten(-1, (count, size)).amax(-1).amax(1)
        past = torch.arange(count) < torch.arange(length)[:, None] // size
        past[:, :sinks] = False
        y = best * past / (best * past).sum(-1, keepdim=True).clamp(min=1e-300)
        logits = torch.einsum("tke,ske->kts", pack.qg[start:end], pack.kg[block : block + count])
        log_pi = (logits / math.sqrt(pack.qg.shape[-1])).masked_fill(~past, -1e30).log_softmax(-1)
        kl = (torch.xlogy(y, y) - y * log_pi).sum(-1)[:, max((1 + sinks) * size, int(length * row_start)) :]
        total, rows, block = total + kl.sum(), rows + kl.shape[1], block + count
    return total / max(rows * kv_heads, 1)


@BOTH
@pytest.mark.parametrize("group", [1, 3])
def test_equals_an_independent_implementation(gate_kl, group):
    pack = Pack.random([30, 0, 1, 7, 8, 9, 41], group=group)
    for row_start, sinks in ((0.0, 0), (0.5, 0), (0.0, 1), (0.5, 2), (0.0, 5)):
        loss, _, dqg, dkg = pack.run(gate_kl, row_start=row_start, sink_blocks=sinks)
        leaves = [x.clone().requires_grad_() for x in (pack.qg, pack.kg)]
        want = independent_kl(replace(pack, qg=leaves[0], kg=leaves[1]), row_start, sinks)
        want_dqg, want_dkg = torch.autograd.grad(want, leaves)
        assert relative(loss, want.detach()) < 1e-12
        assert relative(dqg, want_dqg) < 1e-12 and relative(dkg, want_dkg) < 1e-12


PACKS = {
    "odd": [61, 0, 1, 7, 16, 17, 33],
    "shorter than a block": [3, 15, 0],
    "one long": [131],
    "all empty but one": [0, 0, 40],
}
QUICK = [("odd", group, "row_mean") for group in (1, 4, 5, 7, 8)] + [(name, 3, "published") for name in PACKS]


@pytest.mark.parametrize(
    ("name", "group", "reduction"), grid(QUICK, PACKS, [1, 3, 4, 5, 7, 8], ["row_mean", "published"])
)
def test_loss_gradients_and_stats_equal_reference(name, group, reduction):
    exact = Pack.random(PACKS[name], block_size=16, group=group, kv_heads=2)
    options = {"row_start": 0.3, "reduction": reduction, "recall_budgets": (16, 32, 48, 1600)}
    if reduction == "row_mean":
        options |= {"sink_blocks": group % 3, "row_stride": 1 + group // 2, "row_shift": group}
    want_loss, want_stats, *want_grads = exact.run(reference.gate_kl, **options)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        pack = exact.to(dtype)
        loss, stats, *grads = pack.run(ops.gate_kl, **options)
        assert loss.dtype == dtype and relative(loss, want_loss) <= tolerance
        for got, want in zip(grads, want_grads, strict=True):
            assert got.dtype == dtype and relative(got, want) <= tolerance
        assert stats.rows == want_stats.rows
        assert relative(stats.kl_per_head, want_stats.kl_per_head) <= tolerance
        torch.testing.assert_close(stats.recall.double(), want_stats.recall, rtol=0, atol=tolerance)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 45), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 3, 8, 16]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    gate_dim=st.integers(1, 9),
    row_start=st.sampled_from([0.0, 0.25, 0.5, 0.99]),
    rows=st.fixed_dictionaries(
        {"sink_blocks": st.integers(0, 2), "row_stride": st.integers(1, 20), "row_shift": st.integers(0, 30)}
    ),
    seed=st.integers(0, 1000),
)
def test_any_packing_equals_reference(lengths, block_size, kv_heads, group, gate_dim, row_start, rows, seed):
    made = {"block_size": block_size, "kv_heads": kv_heads, "group": group, "gate_dim": gate_dim, "seed": seed}
    pack = Pack.random(lengths, dim=6, **made)
    options = {"row_start": row_start, "recall_budgets": (2 * block_size,), **rows}
    want_loss, want_stats, *want_grads = pack.run(reference.gate_kl, **options)
    loss, stats, *grads = pack.run(ops.gate_kl, **options)
    torch.testing.assert_close(loss, want_loss, rtol=1e-10, atol=1e-14)
    for got, want in zip((*grads, *stats), (*want_grads, *want_stats), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-13)


EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float16)}
SCALED = {"softcap": 4.0, "sm_scale": 0.6, "gate_scale": 0.9, "sinks": torch.linspace(-2, 2, 6).double()}
VARIANTS = {
    "bfloat16": ({"dtype": torch.bfloat16}, torch.bfloat16, {}, 1e-5, EPS[torch.bfloat16]),  # only inputs are rounded
    "float16": ({"dtype": torch.float16}, torch.float16, {}, 1e-5, EPS[torch.float16]),
    "gates in float32": ({"dtype": torch.bfloat16}, torch.float32, {}, 1e-5, 1e-5),
    "sinks, softcap and scales": ({"group": 3}, torch.float64, SCALED, 1e-10, 1e-10),
    "scores in the hundreds": ({"dtype": torch.float32, "spread": 60.0}, torch.float32, {}, 1e-4, 1e-3),
}


@pytest.mark.parametrize(("made", "gates", "options", "of_loss", "of_gradients"), VARIANTS.values(), ids=VARIANTS)
def test_dtypes_and_options_equal_reference(made, gates, options, of_loss, of_gradients):
    pack = Pack.random([90, 40], **made)
    pack.qg, pack.kg = pack.qg.to(gates), pack.kg.to(gates)
    want_loss, _, *want_grads = pack.to(torch.float64).run(reference.gate_kl, **options)
    loss, _, *grads = pack.run(ops.gate_kl, **options)
    assert loss.dtype == torch.promote_types(gates, torch.float32) and relative(loss, want_loss) < of_loss
    for got, want in zip(grads, want_grads, strict=True):
        assert got.dtype == gates and relative(got, want) < of_gradients


def test_a_known_log_sum_exp_gives_the_same():
    pack = Pack.random([60, 0, 21], group=3)
    options = {"sinks": torch.randn(6).double(), "softcap": 4.0}
    lse = ops.attention_with_block_targets(pack.q, pack.k, pack.k, pack.cu, 8, **options).lse
    options["sink_blocks"] = 1  # their attention is in the sum
    want = pack.run(ops.gate_kl, **options)
    got = pack.run(ops.gate_kl, **options, lse=lse)
    for a, b in zip((got[0], *got[1], *got[2:]), (want[0], *want[1], *want[2:]), strict=True):
        torch.testing.assert_close(a, b)
    # It is used: with a larger sum for one head of the group, the others win the maximum.
    lse[:, 0] += 3.0
    assert not torch.equal(pack.run(ops.gate_kl, **options, lse=lse)[0], want[0])


@BOTH
@pytest.mark.parametrize("lengths", [[8, 3, 0], [0], [1]])
def test_no_counted_row_means_zero_not_nan(gate_kl, lengths):
    pack = Pack.random(lengths, block_size=8)
    for more in ({}, {"reduction": "published"}, {"sink_blocks": 1}):
        loss, stats, dqg, dkg = pack.run(gate_kl, **more, recall_budgets=(16,))
        assert loss == 0 and stats.rows == 0
        assert not stats.kl_per_head.any() and not stats.recall.any() and not dqg.any() and not dkg.any()


def test_segments_do_not_see_each_other():
    pack = Pack.random([40, 24], block_size=8)
    _, _, dqg, dkg = pack.run(ops.gate_kl)
    pack.q[40:], pack.k[40:], pack.qg[40:], pack.kg[5:] = math.nan, math.nan, math.nan, math.nan
    _, _, dqg_poisoned, dkg_poisoned = pack.run(ops.gate_kl)
    torch.testing.assert_close(dqg_poisoned[:40], dqg[:40], rtol=0, atol=0)
    torch.testing.assert_close(dkg_poisoned[:5], dkg[:5], rtol=0, atol=0)


def test_many_small_chunks_change_nothing(monkeypatch):
    pack = Pack.random([150, 91], block_size=16, group=3)
    options = {"recall_budgets": (48, 64), "sink_blocks": 1, "row_stride": 2}
    want = pack.run(ops.gate_kl, **options)
    monkeypatch.setattr(teacher, "CHUNK_BYTES_CPU", 1)
    monkeypatch.setattr(teacher, "MIN_ROWS", 7)
    got = pack.run(ops.gate_kl, **options)
    for a, b in zip((got[0], *got[1], *got[2:]), (want[0], *want[1], *want[2:]), strict=True):
        torch.testing.assert_close(a, b)


def test_backward_scales_and_can_be_repeated():
    """Of transposed gates; the teacher gets no gradient."""
    pack = Pack.random([40])
    _, _, dqg, dkg = pack.run(ops.gate_kl)
    base, kg = pack.qg.transpose(0, 1).contiguous().requires_grad_(), pack.kg.requires_grad_()
    q, k = pack.q.requires_grad_(), pack.k.requires_grad_()
    loss, stats = ops.gate_kl(q, k, base.transpose(0, 1), kg, pack.cu, 8)
    assert not any(x.requires_grad for x in stats)
    (-2.5 * loss).backward(retain_graph=True)
    torch.testing.assert_close(base.grad.transpose(0, 1), -2.5 * dqg)
    (-2.5 * loss).backward()  # the stored gradients were not spoilt by the first
    torch.testing.assert_close(kg.grad, -5.0 * dkg)
    assert q.grad is None and k.grad is None


@pytest.mark.parametrize("which", ["qg", "kg"])
def test_only_the_wanted_gradient_is_kept_and_once(which):
    pack = Pack.random([40])
    _, _, *want = pack.run(ops.gate_kl)
    leaf = getattr(pack, which).requires_grad_()
    loss, _ = ops.gate_kl(pack.q, pack.k, pack.qg, pack.kg, pack.cu, 8)
    assert sum(saved is not None for saved in loss.grad_fn.saved_tensors) == 1
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, leaf, create_graph=True)  # else a penalty on it would count for nothing
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], want[which == "kg"])
    with torch.no_grad():
        assert not ops.gate_kl(pack.q, pack.k, pack.qg, pack.kg, pack.cu, 8)[0].requires_grad
