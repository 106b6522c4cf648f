"""Attention with block targets against the reference in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seergate import ops
from seergate.ops import attention, reference
from seergate.ops.triton_impl import packs, teacher
from tests.ops.triton.conftest import NARROW, moved
from tests.ops.triton.conftest import small_tiles as tiles
from tests.support.op_inputs import EXACT, Pack, cu_seqlens, grid, relative

TOLERANCE = {torch.float32: EXACT, torch.float16: 2e-3, torch.bfloat16: 1e-2}
LENGTHS = [45, 0, 1, 7, 16, 17]


@pytest.fixture
def small_tiles(monkeypatch):
    tiles(monkeypatch)


def on(device, pack):
    """The pack's queries and keys on the device."""
    return moved((pack.q, pack.k), device)


def check(pack, values, device, **options):
    """Compare attention, its targets, and targets from a known log-sum-exp with the reference."""
    q, k = on(device, pack)
    exact = pack.to(torch.float64)
    wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    there = moved(options, device)
    want = reference.attention_with_block_targets(exact.q, exact.k, values.double(), pack.cu, pack.block_size, **wide)
    got = ops.attention_with_block_targets(q, k, values.to(device), pack.cu, pack.block_size, **there)
    assert got.output.dtype == values.dtype and got.lse.dtype == got.log_targets.dtype == torch.float32
    past = want.log_targets > -torch.inf
    assert torch.equal(got.log_targets.cpu() > -torch.inf, past)  # and no NaN
    assert relative(got.output.cpu(), want.output) < TOLERANCE[values.dtype]
    torch.testing.assert_close(got.lse.cpu().double(), want.lse, rtol=EXACT, atol=EXACT)
    logs = {"rtol": EXACT, "atol": max(EXACT, 5e-6)}
    torch.testing.assert_close(got.log_targets.cpu()[past].double(), want.log_targets[past], **logs)

    scale = 1 / math.sqrt(q.shape[-1]) if options.get("sm_scale") is None else options["sm_scale"]
    given = attention.Pack(q, k, pack.cu, scale, there.get("sinks"), options.get("softcap"))
    side = teacher.Teacher(given, pack.block_size)
    pieces = packs.whole_segments(packs.segments(pack.cu, len(q)))
    (table,) = packs.to_device([packs.row_tiles(pieces, side.launch().rows, packed=True)], q.device)
    again = torch.full_like(got.log_targets, -torch.inf)
    side.maxima(table, got.lse, again, 1)
    torch.testing.assert_close(again, got.log_targets, **logs)


def values_of(pack, dim=None):
    return torch.randn(*pack.k.shape[:2], dim or pack.k.shape[2]).to(pack.k.dtype)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("group", [1, 4, 5, 7, 8])
def test_any_group(group, device):
    pack = Pack.random(LENGTHS, block_size=16, group=group, kv_heads=2, dtype=torch.float32)
    check(pack, values_of(pack), device)


@pytest.mark.parametrize(
    ("block_size", "two_loops"),
    grid([(8, True), (32, False), (64, True), (128, False)], [8, 32, 64, 128], [True, False]),
)
def test_blocks_smaller_and_larger_than_a_tile_of_keys(block_size, two_loops, device, monkeypatch):
    tiles(monkeypatch, rows=64, two_loops=two_loops)
    pack = Pack.random([150, 40], block_size=block_size, group=2, kv_heads=1, dtype=torch.float32)
    check(pack, values_of(pack), device)


def test_blocks_of_several_tiles_of_keys(device, monkeypatch):
    tiles(monkeypatch, rows=64, keys=64)
    pack = Pack.random([290, 20], block_size=256, group=1, kv_heads=1, dtype=torch.float32)
    check(pack, values_of(pack), device)


@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (96, 32), (16, 48), (256, 256)])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_head_dimensions_with_the_shipped_tiles(dim, value_dim, dtype, device):
    pack = Pack.random([67, 30], block_size=16, group=4, kv_heads=1, dim=dim, dtype=dtype)
    check(pack, values_of(pack, value_dim), device)


SINKS = {"sinks": torch.tensor([0.3, -1.0, 4.0, 0.0, 2.0, -3.0])}
CAP = {"softcap": 3.0}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("options", [SINKS | {"sm_scale": 0.4}, CAP | SINKS | {"sm_scale": 0.7}, CAP], ids=str)
def test_sinks_softcap_and_scale(options, device):
    pack = Pack.random([50, 20], block_size=16, group=3, kv_heads=2, dtype=torch.float32)
    check(pack, values_of(pack), device, **options)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("window", [1, 17, 64])
def test_a_window_hides_whole_tiles(window, device):
    """Some rows see nothing of a tile of keys; with a cap, as PyTorch's kernels take the rest."""
    pack = Pack.random([150, 20], group=3, dtype=torch.float32)
    values, sinks = values_of(pack), torch.tensor([-math.inf, -2.0, 0.0, 1.0, -math.inf, 3.0])
    options = {"window": window, "softcap": 3.0, "sinks": sinks.to(device)}
    exact, wide = pack.to(torch.float64), options | {"sinks": sinks.double()}
    want = reference.packed_attention(exact.q, exact.k, values.double(), pack.cu, **wide)
    got = ops.packed_attention(*on(device, pack), values.to(device), pack.cu, **options)
    torch.testing.assert_close(got.output.cpu().double(), want.output, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(got.lse.cpu().double(), want.lse, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("lengths", [[0], [0, 0], [1], [5, 0, 3]], ids=str)
def test_packs_without_a_past_block(lengths, device):
    pack = Pack.random(lengths, block_size=8, dtype=torch.float32)
    check(pack, values_of(pack), device)


@settings(max_examples=5)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    block_size=st.sampled_from([8, 16, 32, 64]),
    group=st.integers(1, 6),
    dim=st.integers(1, 40),
    keys=st.sampled_from([16, 64]),
    seed=st.integers(0, 1000),
)
def test_any_shape(lengths, block_size, group, dim, keys, seed):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.MonkeyPatch.context() as patch:
        tiles(patch, keys=keys)
        made = {"block_size": block_size, "kv_heads": 1, "group": group, "dim": dim, "seed": seed}
        pack = Pack.random(lengths, dtype=torch.float32, **made)
        check(pack, values_of(pack), device)


@pytest.mark.usefixtures("small_tiles")
def test_large_scores_and_probabilities_that_underflow(device):
    pack = Pack.random([90], block_size=8, group=7, dtype=torch.float32, spread=60.0)  # 7: a tile has an empty head
    exact = pack.to(torch.float64)
    want = reference.block_targets(exact.q, exact.k, pack.cu, 8)
    got = ops.block_targets(*on(device, pack), pack.cu, 8)
    assert relative(got.cpu(), want) < 1e-4
    # The row's own key takes everything: past probabilities are e^-200 and e^-201, zero in fp32; their ratio is e.
    k = torch.zeros(24, 1, 1)
    k[8:16], k[16:] = -1.0, 200.0
    got = ops.block_targets(torch.ones(24, 1, 1).to(device), k.to(device), cu_seqlens([24]), 8, 1.0)[23, 0, :2]
    torch.testing.assert_close(got.cpu(), torch.tensor([0.0, -1.0]).softmax(0))


@pytest.mark.usefixtures("small_tiles")
def test_segments_do_not_see_each_other(device):
    pack = Pack.random([40, 24], block_size=8, dtype=torch.float32)
    values = values_of(pack)
    want = ops.attention_with_block_targets(*on(device, pack), values.to(device), pack.cu, 8)
    for rows in (slice(0, 40), slice(40, 64)):
        poisoned = pack.to(torch.float32)
        other = values.clone()
        poisoned.q[rows], poisoned.k[rows], other[rows] = math.nan, math.nan, math.nan
        got = ops.attention_with_block_targets(*on(device, poisoned), other.to(device), pack.cu, 8)
        kept = slice(40, 64) if rows.start == 0 else slice(0, 40)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a[kept], b[kept])


@pytest.mark.usefixtures("small_tiles")
def test_strided_inputs(device):
    pack = Pack.random([40, 9], block_size=8, dtype=torch.float32)
    q, k = on(device, pack)
    v = values_of(pack).to(device)
    want = ops.attention_with_block_targets(q, k, v, pack.cu, 8)
    fused = torch.cat((q, k, v), dim=1)  # as one projection gives them
    views = fused[:, :4], fused[:, 4:6], v.transpose(1, 2).contiguous().transpose(1, 2)
    for a, b in zip(ops.attention_with_block_targets(*views, pack.cu, 8), want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("small_tiles")
def test_little_scratch_changes_nothing(device, monkeypatch):
    pack = Pack.random([50, 20], block_size=8, group=5, dtype=torch.float32)
    v = values_of(pack).to(device)
    want = ops.attention_with_block_targets(*on(device, pack), v, pack.cu, 8)
    monkeypatch.setattr(teacher, "SCRATCH_BYTES", 1)
    monkeypatch.setattr(teacher, "gpu_of", lambda device: type("Gpu", (), {"processors": 4, "backend": "cuda"}))
    for a, b in zip(ops.attention_with_block_targets(*on(device, pack), v, pack.cu, 8), want, strict=True):
        assert torch.equal(a, b)


def test_what_the_kernels_do_not_do_is_left_to_torch(device):
    for pack in (
        Pack.random([40], block_size=6, dtype=torch.float32),
        Pack.random([40], block_size=8, dim=130, dtype=torch.float32),
    ):
        q, k = on(device, pack)
        want = reference.block_targets(pack.q.double(), pack.k.double(), pack.cu, pack.block_size)
        got = ops.block_targets(q, k, pack.cu, pack.block_size)
        assert got.dtype == torch.float32 and relative(got.cpu(), want) < 1e-5
        out = ops.attention_with_block_targets(q, k, k, pack.cu, pack.block_size)
        want_out = reference.attention_with_block_targets(q.cpu(), k.cpu(), k.cpu(), pack.cu, pack.block_size)
        assert relative(out.output.cpu(), want_out.output) < 1e-5


def test_no_gradient_reaches_the_teacher(device):
    pack = Pack.random([30], dtype=torch.float32)
    q, k = (x.requires_grad_() for x in on(device, pack))
    assert not any(x.requires_grad for x in ops.attention_with_block_targets(q, k, k, pack.cu, 8))
