"""The part of ``seergate figure trained`` on natural text, with gates that are not trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seergate.cli import text_figure
from seergate.cli.models import load_model, model_path
from seergate.config import RETENTION, SCORERS, GateConfig
from seergate.hf.bank import GateBank
from seergate.report.forced import forced_table


def test_every_kind_of_gates_has_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PROMPT": 24, "STEPS": 3, "BUDGETS": (16, 32), "SHARE": 0.6}.items():
        monkeypatch.setattr(text_figure, name, value)
    model = load_model(model_path("python-text"), "float32")
    gates = {name: str(tmp_path / name) for name in (*RETENTION, *SCORERS)}
    for name, place in gates.items():
        GateBank.for_model(model, GateConfig(8, 16, scorer=name)).save_pretrained(place)
    page = "\n\n".join(text_figure.on_text(gates, 2, tmp_path))
    assert "of 2 modules" in page and "(text.png)" in page and (tmp_path / "text.png").stat().st_size > 20_000
    at_budgets, at_bytes = page.split("### At equal bytes read, 60%")
    names = [*(f"gate [{scorer}]" for scorer in SCORERS), *RETENTION]
    for name in ("oracle", *names):
        assert at_budgets.count(f"| {name} ") == 2, name
    rows = json.loads((tmp_path / "text.json").read_text())["rows"]
    assert [(row["method"], row["budget"]) for row in rows if row["part"] == "budget"] == [
        ("dense", None),
        *(("oracle", budget) for budget in (16, 32)),
        *((name, budget) for budget in (16, 32) for name in names if name.startswith("gate")),
        *((name, budget) for name in RETENTION for budget in (16, 32)),
    ]
    equal = {row["method"] for row in rows if row["part"] == "bytes"}
    assert equal >= {"gate [attn_gate]", *RETENTION} and all(f"\n| {name} " in at_bytes for name in equal)
    assert "nan" not in page

    compared = next(row for row in rows if "kl_minus_gate" in row)
    table = forced_table([rows[0], compared | {"kl_minus_gate_95": [float("nan")] * 2}])  # of one module
    assert f"{compared['kl_minus_gate']:+.4f} |" in table and "nan" not in table
