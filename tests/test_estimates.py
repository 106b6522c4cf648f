"""`benchmarks/estimates.py` writes the tables of docs/scale.md and counts what the code has."""

import math

import pytest
import torch

from benchmarks import estimates
from benchmarks.estimates import GPUS, PACKS, Shape, decode_seconds, filled, pack_seconds
from seergate.distill import load_train_config
from seergate.distill.estimate import architecture, make_plan
from seergate.distill.memory import TILE_COPIES
from seergate.models.gate_bank import GateBank
from seergate.models.loading import skeleton

SHAPE = Shape("qwen3-8b")


def test_the_page_has_the_scripts_tables():
    page = estimates.PAGE.read_text()
    assert filled(page) == page, "run `python benchmarks/estimates.py --write`"
    assert "**Nothing here was\nmeasured on a GPU.**" in page
    with pytest.raises(ValueError, match="the page has 0 places for '<!-- estimate: reading -->'; it must have one"):
        filled("# Scale")


def test_weights_and_gates_are_counted_as_the_model_has_them():
    config = load_train_config("qwen3-8b")
    model = skeleton(architecture(config))
    norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert sum(p.numel() for p in model.parameters()) == SHAPE.linear + 2 * SHAPE.embedding + norms
    bank = GateBank.for_model(model, config.gates(SHAPE.dim))
    assert sum(p.numel() for p in bank.parameters() if p.ndim > 1) == SHAPE.gates
    assert estimates.QUERY_COPIES == TILE_COPIES


def test_a_rate_without_end_is_refused():
    with pytest.raises(ValueError, match="tflops is inf; it must be positive and finite"):
        make_plan(load_train_config("qwen3-8b"), memory_gb=80, tflops=math.inf)


def test_the_linear_layers_agree_with_the_plan():
    """The plan has all products at one rate."""
    plan = make_plan(load_train_config("qwen3-8b"), memory_gb=80, tflops=300)
    parts = pack_seconds(SHAPE, PACKS["1 x 32k"], 64, 0.5, 1)
    rates = {"linear layers": "products in bfloat16, FLOP/s", "attention": "causal attention, FLOP/s"}
    rates["the teacher's block maxima"] = "block maxima, FLOP/s"
    flop = sum(parts[name] * estimates.RATES[rate] for name, rate in rates.items())
    assert flop == pytest.approx(plan.step_flop / plan.config.packs_per_step, rel=0.03)  # the gates' own are the rest


def test_a_step_of_known_bytes():
    """One row of 32k tokens: 15.1 GB of weights and 4.83 of keys and values, and two launches in each of 36 layers."""
    dense, sparse = (decode_seconds(SHAPE, GPUS["H100"], 1, 32768, gate=gate) for gate in (False, True))
    assert dense == pytest.approx((15.136e9 + 32768 * 147456) / (0.85 * 3.35e12) + 72 * 2e-6, rel=1e-3)
    assert sparse == pytest.approx(
        (15.136e9 + 4096 * 147456) / (0.85 * 3.35e12) + (512 * 73728 + 66e6) / (0.6 * 3.35e12) + 180 * 2e-6, rel=1e-3
    )
    more = (decode_seconds(SHAPE, GPUS["H200"], 8, n, gate=True) for n in (65536, 131072))
    assert next(more) < next(more) < decode_seconds(SHAPE, GPUS["H200"], 8, 65536, gate=False)


def test_it_runs_without_a_model_and_says_that_nothing_was_measured(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["estimates.py"])
    monkeypatch.setitem(estimates.TABLES, "plans", lambda shape: ["| plans |"])
    with torch.device("meta"):
        estimates.main()
    output = capsys.readouterr().out
    assert "Not measured on a GPU. Rates:" in output and "| plans |" in output
