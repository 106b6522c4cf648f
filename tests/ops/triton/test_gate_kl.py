"""The gate's loss, gradients, KL by head and recall against the reference in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seergate import ops
from seergate.ops import reference
from seergate.ops.triton_impl import gate_kl, launch, teacher
from seergate.ops.triton_impl.launch import GateLaunch
from tests.ops.triton.conftest import NARROW, moved, small_tiles
from tests.support.op_inputs import EXACT, Pack, relative

LENGTHS = [45, 0, 1, 7, 16, 17]


@pytest.fixture(autouse=True)
def _tiles(monkeypatch):
    small_tiles(monkeypatch, keys=64)
    monkeypatch.setattr(gate_kl, "gate_launch", lambda dim, dtype, gpu: GateLaunch(32, 16, 4, 1))


@pytest.fixture
def small_chunks(monkeypatch):
    """Several chunks per segment, and several segments per chunk."""
    from seergate.ops.triton_impl import packs

    monkeypatch.setattr(packs, "MIN_ROWS", 24)
    monkeypatch.setattr(gate_kl, "CHUNK_BYTES", 4 * 2 * 16 * 40)


def run(pack, device, **options):
    """Loss, stats and gradients, on the CPU."""
    there = Pack(*moved((pack.q, pack.k, pack.qg, pack.kg), device), pack.cu, pack.block_size)
    return moved(there.run(ops.gate_kl, **moved(options, device)), "cpu")


def same(got, want):
    """Two results of `run` agree to the last bit."""
    return all(map(torch.equal, (got[0], *got[1], *got[2:]), (want[0], *want[1], *want[2:])))


def check(pack, device, tolerance=EXACT, **options):
    wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    want_loss, want_stats, *want_grads = pack.to(torch.float64).run(reference.gate_kl, **wide)
    loss, stats, *grads = run(pack, device, **options)
    assert loss.dtype == torch.float32 and stats.rows == want_stats.rows
    torch.testing.assert_close(loss.double(), want_loss, rtol=tolerance, atol=1e-9)
    torch.testing.assert_close(stats.kl_per_head.double(), want_stats.kl_per_head, rtol=tolerance, atol=1e-9)
    torch.testing.assert_close(stats.recall.double(), want_stats.recall, rtol=tolerance, atol=tolerance)
    for got, want, x in zip(grads, want_grads, (pack.qg, pack.kg), strict=True):
        assert got.dtype == x.dtype and got.isfinite().all()
        assert relative(got, want) < (tolerance if x.dtype == torch.float32 else torch.finfo(x.dtype).eps)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("group", "reduction"), [(1, "published"), (5, "row_mean"), (7, "published"), (8, "row_mean")]
)
def test_any_group_and_reduction(group, reduction, device):
    pack = Pack.random(LENGTHS, block_size=16, group=group, dtype=torch.float32)
    check(pack, device, row_start=0.3, reduction=reduction, recall_budgets=(16, 32, 48, 1600))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("group", "block_size", "sink_blocks", "row_stride", "row_shift", "known"),
    [
        *((1, 16, 1, 1, 0, True), (3, 8, 2, 8, 5, False), (4, 16, 0, 3, 1, False)),
        *((5, 8, 1, 8, 11, False), (8, 16, 3, 2, 0, True), (7, 8, 1, 64, 3, False)),
    ],
)
def test_sink_blocks_and_every_so_many_th_row(
    group, block_size, sink_blocks, row_stride, row_shift, known, device, monkeypatch
):
    """Sink blocks are in neither distribution, but in the log-sum-exp; nothing is left to torch."""
    monkeypatch.setattr(gate_kl.torch_impl, "gate_kl", None)
    pack = Pack.random([45, 0, 1, 7, 16, 17, 90, 33], block_size=block_size, group=group, dtype=torch.float32)
    lse = reference.attention_with_block_targets(pack.q, pack.k, pack.k, pack.cu, block_size).lse if known else None
    rule = {"sink_blocks": sink_blocks, "row_stride": row_stride, "row_shift": row_shift, "lse": lse}
    check(pack, device, row_start=0.25, recall_budgets=(block_size, 4 * block_size, 1600), **rule)


@pytest.mark.parametrize("rule", [{}, {"sink_blocks": 1, "row_stride": 4, "row_shift": 1}], ids=["all", "some rows"])
@pytest.mark.parametrize("lengths", [[0], [3, 15, 0], [31, 32], [1], [0, 0, 40]], ids=str)
def test_segments_without_a_block_beyond_the_sinks(lengths, rule, device):
    check(Pack.random(lengths, block_size=16, dtype=torch.float32), device, recall_budgets=(32, 48), **rule)


@pytest.fixture
def shipped_tiles(monkeypatch):
    monkeypatch.setattr(teacher, "teacher_launch", launch.teacher_launch)
    monkeypatch.setattr(gate_kl, "gate_launch", launch.gate_launch)


@pytest.mark.usefixtures("shipped_tiles")
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_inputs_with_the_recommended_rows(dtype, device):
    """Gates in 16 bits, in fp32, and in both."""
    pack = Pack.random([301, 77], block_size=16, kv_heads=2, group=3, dim=64, gate_dim=64, dtype=dtype)
    rule = {"sink_blocks": 1, "row_stride": 8, "row_shift": 3, "row_start": 0.25, "recall_budgets": (64,)}
    for queries, keys in ((dtype, dtype), (torch.float32, torch.float32), (torch.float32, dtype)):
        pack.qg, pack.kg = pack.qg.to(queries), pack.kg.to(keys)
        check(pack, device, **rule)


@pytest.mark.usefixtures("shipped_tiles")
@pytest.mark.parametrize(
    ("group", "gate_dim", "gate_dtype"), [(5, 128, torch.float16), (5, 64, torch.float32), (4, 128, torch.float32)]
)
def test_the_tiles_that_ship(group, gate_dim, gate_dtype, device):
    """Also gates in fp32 beside a model in 16 bits, as they are trained."""
    pack = Pack.random([101, 27], block_size=8, kv_heads=1, group=group, gate_dim=gate_dim, dtype=torch.float16)
    pack.qg, pack.kg = pack.qg.to(gate_dtype), pack.kg.to(gate_dtype)
    check(pack, device, row_start=0.25, recall_budgets=(32,))


def test_sinks_softcap_and_scales(device):
    pack = Pack.random([60, 21], group=3, dtype=torch.float32)
    check(pack, device, sinks=torch.randn(6), softcap=4.0, sm_scale=0.6, gate_scale=-0.9)


@settings(max_examples=5)
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    block_size=st.sampled_from([8, 16, 32]),
    group=st.integers(1, 4),
    gate_dim=st.integers(1, 20),
    row_start=st.sampled_from([0.0, 0.5, 0.99]),
    sparse=st.tuples(st.integers(0, 2), st.integers(1, 9), st.integers(0, 9)),
    seed=st.integers(0, 1000),
)
def test_any_packing(lengths, block_size, group, gate_dim, row_start, sparse, seed):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = {"block_size": block_size, "kv_heads": 1, "group": group, "gate_dim": gate_dim, "seed": seed}
    sparse = dict(zip(("sink_blocks", "row_stride", "row_shift"), sparse, strict=True))
    options = {"row_start": row_start, "recall_budgets": (2 * block_size,), **sparse}
    check(Pack.random(lengths, dtype=torch.float32, **made), device, tolerance=1e-5, **options)


def test_a_known_log_sum_exp_gives_the_same(device):
    pack = Pack.random(LENGTHS, block_size=16, group=5, dtype=torch.float32)
    for sinks in (None, torch.randn(10)):
        lse = reference.attention_with_block_targets(pack.q, pack.k, pack.k, pack.cu, 16, sinks=sinks).lse
        check(pack, device, sinks=sinks, lse=lse)
    # It is used: with a larger sum for one head of the group, the others win the maximum.
    lse[:, 0] += 3.0
    assert not torch.equal(run(pack, device, lse=lse)[0], run(pack, device)[0])


def test_recall_with_equal_and_negative_logits(device):
    """Of equal logits the earlier blocks count; the order of negative numbers is not that of their bits."""
    pack = Pack.random([64], block_size=8, kv_heads=1, gate_dim=1, dtype=torch.float32)
    pack.qg = torch.ones(64, 1, 1)
    pack.kg = torch.tensor([-1.0, -2.0, 0.0, -0.0, 3.0, -1.0, -1e-40, 9.0])[:, None, None]
    targets = reference.block_targets(pack.q.double(), pack.k.double(), pack.cu, 8)[63, 0]
    for blocks, best in ((2, [4]), (3, [4, 2]), (4, [4, 2, 3]), (6, [4, 2, 3, 6, 0]), (7, [4, 2, 3, 6, 0, 5])):
        stats = run(pack, device, row_start=63 / 64, recall_budgets=(8 * blocks,))[1]
        assert stats.recall.item() == pytest.approx(targets[best].sum().item(), abs=1e-6), blocks


def test_no_row_between_and_no_sink_is_read(device):
    """NaN in the queries of rows that do not count and in the keys of the first block, given the log-sum-exp."""
    pack, counted = Pack.random([61], block_size=8, dtype=torch.float32), torch.arange(61) % 5 == 4
    rule = {"sink_blocks": 1, "row_stride": 5, "row_shift": 3, "recall_budgets": (32,)}  # from row 16 + 3 on
    rule["lse"] = reference.attention_with_block_targets(pack.q, pack.k, pack.k, pack.cu, 8).lse
    clean = run(pack, device, **rule)
    assert clean[1].rows == 9
    poisoned = pack.to(torch.float32)
    counted[:16] = False
    poisoned.q[~counted] = poisoned.qg[~counted] = poisoned.k[:8] = poisoned.k[56:] = poisoned.kg[[0, 7]] = math.nan
    assert same(run(poisoned, device, **rule), clean)
    assert (clean[2][~counted] == 0).all() and (clean[3][[0, 7]] == 0).all()


def test_what_does_not_count_is_not_read(device):
    """The last block of a segment, rows before ``row_start``, and other segments."""
    pack = Pack.random([40, 24], block_size=8, dtype=torch.float32)
    clean = run(pack, device, row_start=0.5)
    poisoned = pack.to(torch.float32)
    poisoned.kg[[4, 7]] = math.nan
    for start, rows in ((0, 20), (40, 12)):
        poisoned.q[start : start + rows] = math.nan
        poisoned.qg[start : start + rows] = math.nan
    assert same(run(poisoned, device, row_start=0.5), clean)
    pack.q[40:], pack.k[40:], pack.qg[40:], pack.kg[5:] = math.nan, math.nan, math.nan, math.nan
    _, _, dqg, dkg = run(pack, device, row_start=0.5)
    assert torch.equal(dqg[:40], clean[2][:40]) and torch.equal(dkg[:5], clean[3][:5])


@pytest.mark.usefixtures("small_chunks")
def test_two_runs_agree_to_the_last_bit(device):
    pack = Pack.random([60, 20], block_size=8, dtype=torch.float32)
    assert same(*(run(pack, device, recall_budgets=(24,)) for _ in range(2)))


def test_only_what_is_wanted_is_kept(device):
    pack = Pack.random([40], dtype=torch.float32)
    q, k, qg, kg = (x.to(device) for x in (pack.q, pack.k, pack.qg, pack.kg))
    want = dict(zip(("qg", "kg"), run(pack, device)[2:], strict=True))
    for name, x in (("qg", qg), ("kg", kg)):
        x.requires_grad_()
        loss, _ = ops.gate_kl(q, k, qg, kg, pack.cu, 8)
        assert [saved.shape for saved in loss.grad_fn.saved_tensors if saved is not None] == [x.shape]
        assert torch.equal(torch.autograd.grad(loss, x)[0].cpu(), want[name])
        x.requires_grad_(False)
    assert not ops.gate_kl(q.requires_grad_(), k, qg, kg, pack.cu, 8)[0].requires_grad  # the teacher is frozen


def test_gates_in_fp32_that_are_too_wide_are_multiplied_in_bfloat16():
    """Gradients stay fp32; fp16 and narrower gates are left alone."""
    qg = torch.randn(3, 2, 256, requires_grad=True)
    ours, theirs = gate_kl.in_registers(qg, torch.randn(1, 2, 256, dtype=torch.float16))
    assert ours.dtype == torch.bfloat16 and theirs.dtype == torch.float16
    ours.sum().backward()
    assert qg.grad.dtype == torch.float32
    narrow = torch.randn(3, 2, 128)
    assert gate_kl.in_registers(narrow, narrow) == [narrow, narrow]


@pytest.mark.gpu
def test_wide_gates_in_fp32(device, monkeypatch):
    """Gates of Qwen3-Next, Qwen3.5 and Gemma 3 run in the kernels."""
    monkeypatch.setattr(gate_kl.torch_impl, "gate_kl", None)
    pack = Pack.random([300, 77], block_size=16, dim=256, gate_dim=256, dtype=torch.float32)
    pack = Pack(pack.q.bfloat16(), pack.k.bfloat16(), pack.qg, pack.kg, pack.cu, 16)
    want_loss, _, *want_grads = pack.to(torch.float64).run(reference.gate_kl)
    loss, _, *grads = run(pack, device)
    torch.testing.assert_close(loss.double(), want_loss, rtol=2e-2, atol=1e-3)
    for got, want in zip(grads, want_grads, strict=True):
        assert got.dtype == torch.float32 and relative(got, want) < 2e-2
