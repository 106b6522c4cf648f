"""Methods on given texts, compared by the gates' own scores of them."""

import json
from dataclasses import replace

import pytest
import torch

from seergate.config import GateConfig
from seergate.eval import RunOptions, make_task, store, sweep
from seergate.eval.report import Sweep, load_sweeps
from seergate.eval.report.plots import text_plot
from seergate.eval.report.tables import TEXTS, minus_gate, table
from seergate.eval.settings import grid, with_each
from seergate.models.gate_bank import GateBank
from tests.support import evaluation as support

STEPS = 8


def test_settings_are_compared_with_the_first_gates_at_the_same_budget(tmp_path):
    """With gates of two kinds that are not trained."""
    model, tokenizer = support.model(), support.tokenizer()
    banks = {name: GateBank.for_model(model, GateConfig(8, 16, scorer=name)) for name in ("attn_gate", "msa")}
    words = sorted(word for word in tokenizer.get_vocab() if not word.startswith("<"))
    texts = [" ".join(words[(7 * i * j + j) % len(words)] for j in range(90 + i)) for i in range(1, 4)]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    task = make_task(f"perplexity:length=65:scored={STEPS}", data=str(tmp_path / "texts.jsonl"))
    specs, runs = with_each(grid(["dense", "gate", "streaming_llm:interval=1"], [16, 32], 8), banks), tmp_path / "runs"
    sweep(model, tokenizer, task, specs, runs, RunOptions(), gates=banks)
    (found,) = load_sweeps(runs)
    dense, ours, theirs = found.settings[0], found.at("gate [msa]", 16), found.at("gate [attn_gate]", 16)
    assert dense is found.dense and ours is not None and theirs is not None
    assert minus_gate(found, dense) is None and minus_gate(found, theirs) is None
    apart = minus_gate(found, ours)
    assert apart is not None and apart.mean == pytest.approx(ours.metrics["kl"] - theirs.metrics["kl"])
    each = [
        torch.tensor([sum(text["kl"]) / STEPS for text in store.read_samples(runs / name)], dtype=torch.float64)
        for name in ("gate-16-attn_gate", "gate-16-msa")
    ]
    error = 4.302653 * float((each[1] - each[0]).std()) / 3**0.5  # Student's t of two degrees of freedom
    assert [apart.low, apart.high] == pytest.approx([apart.mean - error, apart.mean + error])
    assert minus_gate(found, replace(ours, samples=ours.samples[1:])) is None, "the gate has scored another text"

    one = [replace(s, samples=s.samples[:1]) for s in (dense, theirs, ours)]  # of one text there is no interval
    (alone,) = table(Sweep(one), TEXTS, one[2:]).splitlines()[2:]
    (with_ends,) = table(found, TEXTS, [ours]).splitlines()[2:]
    assert f"{apart.mean:+.4f} (" in with_ends and with_ends.count("(") == 3 and alone.count("(") == 2
    assert "nan" not in with_ends + alone
    drawn = text_plot(found, tmp_path / "kl.png")
    assert drawn is not None and drawn.stat().st_size > 20_000
    assert text_plot(Sweep(found.settings[1:]), tmp_path / "none.png") is None
