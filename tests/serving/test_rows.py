"""Layers that share a step's intermediate results get the results that each computes alone, to the last bit."""

import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from seergate import GateConfig
from seergate.gates.gate import AttnGate
from seergate.methods import make_method
from seergate.serving.common import scoring
from seergate.serving.common.rope import Unrotation
from seergate.serving.common.rows import PagedRows
from seergate.serving.vllm.attention import Counts, Plan, SparseAttention
from seergate.serving.vllm.pages import FlashPages
from tests.support.models import gate_scores, geometry
from tests.support.operators import Operators

K, G, D, E, SIZE, BLOCKS = 2, 3, 16, 8, 8, 40


def rows_of(*lengths: int) -> PagedRows:
    return PagedRows(torch.tensor(lengths), torch.zeros(len(lengths), BLOCKS, 1, dtype=torch.long), lengths)


@pytest.mark.parametrize("turned", [0, 8, 16])
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("options", [{}, {"qk_norm": False}, {"rope": False}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_those_of_the_op(turned: int, neox: bool, options: dict[str, Any], dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    rotary: Any = None
    if turned:
        angles = torch.arange(SIZE * BLOCKS)[:, None] * torch.rand(turned // 2, generator=draw)
        rotary = torch.nn.Module()  # as vLLM has it
        rotary.cos_sin_cache, rotary.is_neox_style = 1.1 * torch.cat((angles.cos(), angles.sin()), -1), neox
    config, unrotate = GateConfig(block_size=SIZE, gate_dim=E, **options), Unrotation(rotary)
    inv_freq = torch.rand(E // 2, generator=draw)
    gate = AttnGate(config, geometry(K * G, K, D, inv_freq=inv_freq, attention_scaling=0.7)).to(dtype)
    gate.requires_grad_(False)
    rows = rows_of(319, 100, 8, 1)
    last_R1 = rows.tensor[:, None] - 1
    query = torch.randn(4, K * G, D, generator=draw).to(dtype)
    summary = torch.randn(4, K, BLOCKS, E, generator=draw).to(dtype)
    plain = unrotate(query, last_R1)
    scores = gate_scores(gate, rotary).scores(query, rows, summary)
    assert torch.equal(scores, gate.step_scores(plain, rows.tensor, summary))
    if rotary is None:
        assert torch.equal(plain, query.float())
        return
    cos, sin = (x[:, None] for x in rotary.cos_sin_cache[rows.tensor - 1].chunk(2, -1))
    part = plain[..., :turned]
    first, second = part.chunk(2, -1) if neox else (part[..., ::2], part[..., 1::2])
    pair = first * cos - second * sin, second * cos + first * sin
    again = torch.cat(pair, -1) if neox else torch.stack(pair, -1).flatten(-2)
    torch.testing.assert_close(torch.cat((again, plain[..., turned:]), -1), query.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("lengths", [(320, 313, 49, 97), (320, 9, 40, 1)])
def test_blocks_of_a_budget_do_not_depend_on_what_the_host_knows(sinks: int, lengths: tuple[int, ...]) -> None:
    method = make_method("quest", token_budget=6 * SIZE, block_size=SIZE, sink_blocks=sinks)
    rows = rows_of(*lengths)
    scores = torch.randint(-2, 3, (4, K, BLOCKS), generator=torch.Generator().manual_seed(1)).float()  # many are equal
    scores[0, 0, ::3], scores[1, 1, ::5], scores[2, 0, 1] = torch.nan, torch.inf, -0.0
    indices, counts = method.choose(scores, rows)
    in_a_graph = method.choose(scores, PagedRows(rows.tensor, rows.table_RNr))
    assert torch.equal(in_a_graph.indices, indices) and torch.equal(in_a_graph.counts, counts)
    unread = [max(0, -(-length // SIZE) - 6) for length in lengths]
    assert counts[:, 0].tolist() == [-(-length // SIZE) - rest for length, rest in zip(lengths, unread, strict=True)]
    tokens = [[length - rest * SIZE] * K for length, rest in zip(lengths, unread, strict=True)]
    assert rows.tokens(counts, SIZE).tolist() == tokens


def test_rows_are_divided_in_order_and_compute_once() -> None:
    rows = rows_of(5, 6, 7, 8, 9)
    assert [part.tensor.tolist() for part in rows.divided(2)] == [[5, 6], [7, 8], [9]]
    assert [part.host for part in rows.divided(2)] == [(5, 6), (7, 8), (9,)]
    assert rows.divided(2) is rows.divided(2)


class Tables(FlashPages):
    """Pages that note the block tables that they are to attend to."""

    noted: ClassVar[list[Tensor]] = []

    def schedule(self, query_QGD: Tensor, table_QX: Tensor, lengths_Q: Tensor) -> None:
        return None

    def attend(
        self, query_QGD: Tensor, table_QX: Tensor, lengths_Q: Tensor, schedule: None, output_QGD: Tensor
    ) -> None:
        self.noted.append(table_QX)


@torch.no_grad()
def test_a_layer_after_the_first_of_a_step_runs_few_operators() -> None:
    draw = torch.Generator().manual_seed(2)
    rotary: Any = torch.nn.Module()
    rotary.cos_sin_cache, rotary.is_neox_style = torch.randn(SIZE * BLOCKS, D, generator=draw), True
    inv_freq = torch.rand(E // 2, generator=draw)
    gate = AttnGate(GateConfig(SIZE, gate_dim=E), geometry(K * G, K, D, inv_freq=inv_freq))
    layer = SparseAttention()
    layer.kind, layer.anchor, layer.num_kv_heads, layer.pages = Tables, layer, K, WeakTensorKeyDictionary()
    layer.method = make_method("quest", token_budget=6 * SIZE, block_size=SIZE)
    layer.scoring, layer.counts = gate_scores(gate, rotary), Counts(*torch.zeros(2, dtype=torch.long))
    numbers = K * (SIZE * 2 * D + E)  # of a page, its summary included
    caches = [torch.randn(2 * BLOCKS * numbers, generator=draw) for _ in range(3)]
    lengths, table = torch.tensor([319, 100]), torch.randperm(2 * BLOCKS, generator=draw).view(2, BLOCKS, 1)
    none = torch.empty(0, dtype=torch.long)

    def step(caches: list[Tensor]) -> list[int]:
        """One step of layers with these caches: how many operators each runs."""
        plan = Plan(
            closed_Cr=none[:, None],
            starts_C=none,
            tokens_R=torch.arange(2),
            rows=PagedRows(lengths, table, lengths.tolist()),
            sparse_B=torch.arange(2),
            dense=None,
            held=419,
            read_all=0,
        )
        counts = []
        for cache in caches:
            paged = cache.as_strided((2 * BLOCKS, K, SIZE, 2 * D), (numbers, SIZE * 2 * D, 2 * D, 1))
            query = cache[: 2 * (K * G + 1) * D].view(2, K * G + 1, D)[:, 1:]  # rows with gaps, as vLLM's
            with Operators() as operators:
                layer.forward(None, query, query, query, paged, SimpleNamespace(plan=plan), torch.empty(2, K * G, D))
            counts.append(len(operators.names))
        return counts

    first, *further = step(caches)
    shared = list(Tables.noted)
    Tables.noted.clear()
    alone = [step([cache])[0] for cache in caches]
    assert all(torch.equal(a, b) for a, b in zip(shared, Tables.noted, strict=True))
    assert max(further) <= 55 < 120 < min(alone), (first, alone, further)


@pytest.mark.parametrize("q_pooling", ["proj", "none", "avgproj"])
def test_the_kernels_of_a_server_have_one_projected_query_per_kv_head(q_pooling: str, monkeypatch) -> None:
    """They add up the projections of a group's heads; other gates are scored by their own `step_scores`."""
    monkeypatch.setattr(scoring, "choose", lambda device: "triton")
    monkeypatch.setitem(sys.modules, "seergate.ops.triton_impl.selection", SimpleNamespace(MAX_BLOCKS=100))
    gate = AttnGate(GateConfig(SIZE, E, q_pooling=q_pooling, rope=False), geometry(K * G, K, D))
    assert gate_scores(gate, None).in_kernels(torch.device("cuda"), 100) == (q_pooling == "proj")
