"""Launches of distillation and the division of a pack into tiles, for all shapes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.kernels.data_sheets import A100, GPUS, H200, MI300X
from seergate.ops.losses import LossOptions, counted_rows
from seergate.ops.triton_impl import launch, packs
from tests.support.op_inputs import cu_seqlens

GPU = pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.target)
LENGTHS = st.lists(st.integers(0, 400), min_size=1, max_size=6)


def power_of_two(x: int) -> bool:
    return x > 0 and x & (x - 1) == 0


@pytest.mark.parametrize(
    ("group", "pack"), [(1, 1), (2, 2), (3, 1), (4, 4), (5, 2), (6, 2), (7, 8), (8, 8), (12, 4), (16, 16), (71, 16)]
)
def test_heads_per_tile(group, pack):
    assert launch.heads_per_tile(group) == pack


@GPU
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_tiles_are_what_matrix_units_and_blocks_need(gpu, dtype):
    for group in range(1, 72):
        for dim in (16, 64, 96, 128, 256):
            for v_dim in (0, dim):
                tile = launch.teacher_launch(group, dim, v_dim, dtype, gpu)
                assert power_of_two(tile.rows) and power_of_two(tile.pack) and power_of_two(tile.keys)
                assert tile.rows * tile.pack >= 16 and tile.keys >= 16
                assert tile.num_warps * gpu.warp_size <= 1024
    for dim in (16, 64, 128, 256):
        tile = launch.gate_launch(dim, dtype, gpu)
        assert tile.rows >= 16 and tile.columns >= 16


@pytest.mark.parametrize("gpu", [A100, replace(A100, arch=86), replace(A100, arch=89), H200])
def test_loads_and_products_overlap(gpu):
    """Two loops need more registers than sm_80 to sm_89 have, and make the output's products serial."""
    assert launch.teacher_launch(4, 128, 0, torch.bfloat16, gpu).two_loops is (gpu is H200)
    for dim in (64, 128):
        assert launch.teacher_launch(4, dim, 0, torch.bfloat16, gpu).num_stages == 3
        with_output = launch.teacher_launch(4, dim, dim, torch.bfloat16, gpu)
        assert with_output.num_stages == 3 and not with_output.two_loops


@given(width=st.integers(4, 13).map(lambda bits: 2**bits), rows=st.sampled_from([16, 32, 64]))
def test_recall_holds_whole_rows_and_divides_a_tile(width, rows):
    for gpu in (H200, MI300X):
        turn, warps = launch.recall_launch(width, rows, gpu)
        assert rows % turn == 0 and 4 <= warps <= 16
        assert turn * width / (warps * gpu.warp_size) <= 16  # numbers per thread


SPARSE = st.sampled_from([(0, 1, 0), (1, 1, 0), (0, 3, 1), (2, 8, 5)])
"""Sink blocks, row stride and row shift."""


def pieces_of(lengths, row_start, block_size, sparse):
    spans = packs.segments(cu_seqlens(lengths), sum(lengths))
    counted = counted_rows(lengths, block_size, row_start, *sparse)
    return packs.segment_pieces(spans, counted, block_size, [float(i) for i in range(len(lengths))], sparse[0])


@given(LENGTHS, st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([8, 64]), st.integers(1, 20000), SPARSE)
def test_chunks_hold_every_row_that_counts_once(lengths, row_start, block_size, area, sparse):
    pieces, (sinks, stride, shift) = pieces_of(lengths, row_start, block_size, sparse), sparse
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    want = [
        start + row
        for start, length in zip(starts, lengths, strict=True)
        for row in range(max(int(length * row_start), block_size * (1 + sinks)) + shift % stride, length, stride)
    ]
    assert [row for piece in pieces for row in piece.rows] == want
    chunks = packs.chunks(pieces, block_size, area)
    assert [row for chunk in chunks for piece in chunk.pieces for row in piece.rows] == want
    assert all(piece.candidates(block_size) > 0 for piece in pieces)
    for chunk in chunks:
        assert chunk.rows == sum(len(piece.rows) for piece in chunk.pieces)
        assert chunk.width % packs.WIDTH_MULTIPLE == 0
        assert all(piece.candidates(block_size) <= chunk.width for piece in chunk.pieces)
        assert chunk.rows * chunk.width <= max(area, packs.MIN_ROWS * chunk.width)
        assert len({piece.start for piece in chunk.pieces}) == len(chunk.pieces)  # no two write the same keys


@given(LENGTHS, st.sampled_from([1, 8, 32]), st.booleans(), SPARSE)
def test_row_tiles(lengths, rows, packed, sparse):
    packed, step = packed and sparse[1] == 1, sparse[1]
    pieces = pieces_of(lengths, 0.25, 8, sparse)
    table, weights = packs.row_tiles(pieces, rows, packed=packed)
    covered, places = [], []
    for (first, stop, start, block, buffer, column), weight in zip(table.tolist(), weights.tolist(), strict=True):
        (piece,) = (piece for piece in pieces if piece.start == start)
        assert (stop, block, column, weight) == (piece.rows[-1] + 1, piece.block, 0, piece.weight)
        here = range(first, stop, step)[:rows]
        covered += here
        places += range(buffer, buffer + len(here))
    assert sorted(covered) == [row for piece in pieces for row in piece.rows]
    assert sorted(places) == (sorted(covered) if packed else list(range(len(covered))))
    past = (table[:, 0] - table[:, 2]).tolist()
    assert past == sorted(past, reverse=True)  # the longest first


@given(LENGTHS, st.sampled_from([1, 4, 32]), SPARSE)
def test_column_tiles(lengths, columns, sparse):
    pieces = pieces_of(lengths, 0.25, 8, sparse)
    table, weights = packs.column_tiles(pieces, columns, 8)
    covered = []
    for (first, stop, start, block, _, column), weight in zip(table.tolist(), weights.tolist(), strict=True):
        (piece,) = (piece for piece in pieces if piece.start == start)
        assert (first, stop, block, weight) == (piece.rows[0], piece.rows[-1] + 1, piece.block, piece.weight)
        covered += range(block + column, block + min(column + columns, piece.candidates(8)))
    want = [piece.block + j for piece in pieces for j in range(piece.candidates(8))]
    assert covered == want and len(set(want)) == len(want)


def test_borders_that_nobody_could_check_before_are_checked():
    with pytest.raises(ValueError, match=r"cu_seqlens is \[0, 5, 3\]; it must start at 0"):
        packs.segments(torch.tensor([0, 5, 3], dtype=torch.int32), 3)


def test_a_pack_is_cut_up_once_for_all_layers(monkeypatch):
    from seergate.ops.triton_impl import gate_kl

    calls, real = [], packs.row_tiles
    monkeypatch.setattr(packs, "row_tiles", lambda *args: calls.append(args) or real(*args))
    gate_kl.cut_up.cache_clear()
    rest = (16, LossOptions(0.5, "row_mean", ()), 2, (16, 16, 32), 2**20, torch.device("cpu"))
    first, again = (gate_kl.cut_up(((0, 100), (100, 260)), *rest) for _ in range(2))
    assert first is again and len(calls) == 2 * len(first[1]) > 0  # two kernels over rows
    assert gate_kl.cut_up(((0, 101), (101, 260)), *rest) is not first
    rows, _, _, weight = first
    assert rows == 50 + 80 and weight.tolist() == [1 / (2 * rows)] * 260
