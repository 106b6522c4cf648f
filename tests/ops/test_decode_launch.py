"""Launches of decoding, for all shapes and GPUs."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.kernels.data_sheets import GPUS
from seergate.ops.triton_impl import launch
from seergate.ops.triton_impl.gpus import H100, assuming, gpu_of

GPU = pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.target)


@given(pairs=st.integers(0, 4096), tiles=st.integers(0, 9000), processors=st.integers(1, 400))
def test_splits(pairs, tiles, processors):
    splits = launch.decode_splits(pairs, tiles, processors)
    assert 1 <= splits <= launch.MAX_SPLITS
    if splits > 1:
        assert tiles // splits >= launch.MIN_TILES  # every split has something to load ahead
        assert pairs * (splits - 1) < launch.FILLED * processors  # and the device needs all of them
    elif pairs and tiles >= 2 * launch.MIN_TILES:
        assert pairs >= launch.FILLED * processors


@GPU
@pytest.mark.parametrize(("dim", "element_size"), [(64, 2), (96, 2), (128, 2), (256, 2), (64, 4), (96, 4), (128, 4)])
def test_tiles_fit(dim, element_size, gpu):
    tile, _, num_warps, num_stages = launch.decode_launch(8, 32768, dim, dim, element_size, gpu)
    row = 2 * launch.padded(dim) * element_size
    assert 16 <= tile <= 64 and tile & (tile - 1) == 0 and num_warps in (4, 8)
    assert num_stages >= 2  # at least one tile is on its way while another is computed
    assert launch.PROGRAMS_PER_PROCESSOR * (num_stages - 1) * tile * row <= gpu.shared_memory


@given(width=st.sampled_from([16 << n for n in range(11)]))
def test_warps_of_select_blocks(width):
    warps = launch.select_warps(width)
    assert warps in (1, 2, 4, 8, 16) and (warps == 1 or width // (32 * warps) >= 16)


def test_a_device_that_is_no_gpu_takes_the_assumed_one():
    other = dataclasses.replace(H100, processors=66)
    assert gpu_of(torch.device("meta")) is H100
    with assuming(other):
        assert gpu_of(torch.device("cpu")) is other
    assert gpu_of(torch.device("cpu")) is H100


@pytest.mark.gpu
def test_the_gpu_that_is_here():
    gpu, properties = gpu_of(torch.device("cuda")), torch.cuda.get_device_properties()
    assert gpu.processors == properties.multi_processor_count and gpu.shared_memory >= 48 << 10
    assert gpu.backend == ("cuda" if torch.version.hip is None else "hip")
