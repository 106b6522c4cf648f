"""Memory of gate_kl, counted by the allocator: linear in the length of the pack, and never rows x blocks."""

from functools import partial

import pytest
import torch

from benchmarks.common import peak_bytes
from seergate import ops
from seergate.ops.torch_impl import teacher


def test_the_counter_counts():
    assert 2 * 4 * 10**6 <= peak_bytes(lambda: torch.ones(10**6) + torch.ones(10**6).mul_(2)) <= 4 * 4 * 10**6


@pytest.mark.plain_empty
def test_extra_memory_at_most_doubles_when_the_pack_doubles(monkeypatch):
    # A smaller score buffer, so that a constant does not hide what grows.
    monkeypatch.setattr(teacher, "CHUNK_BYTES_CPU", 2**21)
    group, dim, block_size = 2, 8, 16
    peaks = {}
    for tokens in (4096, 8192, 16384):
        q, k = torch.randn(tokens, group, dim), torch.randn(tokens, 1, dim)
        qg = torch.randn(tokens, 1, dim, requires_grad=True)
        kg = torch.randn(tokens // block_size, 1, dim, requires_grad=True)
        cu = torch.tensor([0, tokens], dtype=torch.int32)
        # The last eighth of the rows: the longest ones, and quick.
        run = partial(ops.gate_kl, q, k, qg, kg, cu, block_size, row_start=0.875, recall_budgets=(1024,))
        peaks[tokens] = peak_bytes(lambda run=run: run()[0].backward())
        rows_times_blocks = tokens // 8 * (tokens // block_size) * 4
    assert peaks[8192] <= 2 * peaks[4096] and peaks[16384] <= 2 * peaks[8192], peaks
    assert peaks[16384] < rows_times_blocks / 2, peaks
