"""Layers that share what a step computes once get, to the last bit, what each would compute alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from seergate import GateConfig
from seergate.gates.gate import AttnGate
from seergate.methods import make_method
from seergate.ops.torch_impl.selection import candidates_of, ranked_blocks
from seergate.serving.rope import Unrotation
from seergate.serving.rows import Rows, divided
from seergate.serving.scoring import GateScores

K, G, D, E, SIZE, BLOCKS = 2, 3, 16, 8, 8, 40


def rows_of(*lengths: int) -> Rows:
    return Rows(torch.tensor(lengths), torch.zeros(len(lengths), BLOCKS, 1, dtype=torch.long), kept=6)


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
    gate = AttnGate(config, num_heads=K * G, num_kv_heads=K, head_dim=D, inv_freq=inv_freq, attention_scaling=0.7).to(
        dtype
    )
    gate.requires_grad_(False)
    rows = rows_of(319, 100, 8, 1)
    last_R1 = rows.lengths_R[:, None] - 1
    query = torch.randn(4, K * G, D, generator=draw).to(dtype)
    summary = torch.randn(4, K, BLOCKS, E, generator=draw).to(dtype)
    plain = unrotate(query, last_R1)
    found = GateScores(gate, unrotate).scores(query, rows, summary, lambda: summary)
    assert torch.equal(found, gate.step_scores(plain, rows.lengths_R, summary))
    if rotary is None:
        assert torch.equal(plain, query.float())
        return
    cos, sin = (x[:, None] for x in rotary.cos_sin_cache[rows.lengths_R - 1].chunk(2, -1))
    part = plain[..., :turned]
    first, second = part.chunk(2, -1) if neox else (part[..., ::2], part[..., 1::2])
    pair = first * cos - second * sin, second * cos + first * sin
    again = torch.cat(pair, -1) if neox else torch.stack(pair, -1).flatten(-2)
    torch.testing.assert_close(torch.cat((again, plain[..., turned:]), -1), query.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sinks", [0, 2])
def test_blocks_of_a_budget_are_the_methods(sinks: int) -> None:
    method = make_method("quest", token_budget=6 * SIZE, block_size=SIZE, sink_blocks=sinks)
    rows = rows_of(320, 313, 49, 97)
    scores = torch.randint(-2, 3, (4, K, BLOCKS), generator=torch.Generator().manual_seed(1)).float()  # many are equal
    scores[0, 0, ::3], scores[1, 1, ::5], scores[2, 0, 1] = torch.nan, torch.inf, -0.0
    indices, counts = method.choose(scores, rows.lengths_R)
    found = ranked_blocks(scores, candidates_of(rows.lengths_R, BLOCKS, SIZE, sinks), 6).sort(-1).values
    assert torch.equal(found.int(), indices) and counts.eq(6).all()


def test_rows_are_divided_in_order_and_compute_once() -> None:
    rows = rows_of(5, 6, 7, 8, 9)
    assert [part.lengths_R.tolist() for part in divided(rows, 2)] == [[5, 6], [7, 8], [9]]
    parts = rows.once(divided, 2)
    assert rows.once(divided, 2) is parts and rows.once(divided, 3) is not parts
    assert all(part.kept == rows.kept for part in parts)
