"""Methods on given texts, fed token by token."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from seergate.config import GateConfig
from seergate.eval import RunOptions, make_task, store, sweep
from seergate.eval.forced import TeacherForcing, pieces
from seergate.eval.report import Sweep, load_sweeps
from seergate.eval.report.plots import text_plot
from seergate.eval.report.tables import TEXTS, minus_gate, table
from seergate.eval.settings import grid, with_each
from seergate.models.gate_bank import GateBank
from tests.support import evaluation as support

LENGTH, STEPS = 65, 8
METHODS = ["dense", "oracle", "gate", "streaming_llm:interval=1", "fast_kvzip:interval=1"]


class Letters:
    """A tokenizer of letters."""

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 97 for letter in text]}


def test_pieces_are_the_middles_of_texts_that_are_long_enough() -> None:
    texts = ["abcdefg", "xy", "bcdef", "aaaaa", "cdefghi"]
    assert pieces(Letters(), texts, 5).tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [0] * 5, [3, 4, 5, 6, 7]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every kind of method, with gates that are not trained."""
    out, model, tokenizer = tmp_path_factory.mktemp("forced"), support.model(), support.tokenizer()
    scorers = {"mine": "attn_gate", "msa": "msa", "fast_kvzip": "fast_kvzip"}
    banks = {name: GateBank.for_model(model, GateConfig(8, 16, scorer=of)) for name, of in scorers.items()}
    words = sorted(word for word in tokenizer.get_vocab() if not word.startswith("<"))
    texts = [" ".join(words[(7 * i * j + j) % len(words)] for j in range(90 + i)) for i in range(1, 4)]
    (out / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    task = make_task(f"perplexity:length={LENGTH}:scored={STEPS}", data=str(out / "texts.jsonl"))
    specs = with_each(grid(METHODS, [16, 32, 128], 8), banks)
    sweep(model, tokenizer, task, specs, out / "runs", RunOptions(), gates=banks)
    return out / "runs"


@pytest.fixture(scope="module")
def found(runs: Path) -> Sweep:
    return load_sweeps(runs)[0]


def test_what_reads_everything_says_what_dense_attention_says(runs: Path, found: Sweep) -> None:
    rows = {(s.series, s.budget): s.metrics for s in found.settings}
    everything = [row for (_, budget), row in rows.items() if budget in (None, 128)]
    assert len(everything) == 6 and all(row["kl"] < 1e-6 and row["agreement"] == 1 for row in everything)
    partly = {method: row["kl"] for (method, budget), row in rows.items() if budget == 16}
    assert partly.keys() == {"oracle", "gate [mine]", "gate [msa]", "streaming_llm", "fast_kvzip"}
    assert min(partly.values()) > 1e-5
    model, tokenizer = support.model(), support.tokenizer()
    task = make_task(f"perplexity:length={LENGTH}:scored={STEPS}", data=str(runs.parent / "texts.jsonl"))
    tokens = TeacherForcing.of(model, tokenizer, task.bound(tokenizer)).ids
    with torch.inference_mode():
        logits = model(tokens[:, :-1]).logits[:, -STEPS:].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, tokens[:, -STEPS:].flatten())
    assert rows["dense", None]["perplexity"] == pytest.approx(loss.exp().item(), rel=1e-4)


def test_settings_are_compared_with_the_first_gates_at_the_same_budget(runs, found, tmp_path):
    dense, ours, theirs = found.settings[0], found.at("gate [msa]", 16), found.at("gate [mine]", 16)
    assert dense is found.dense and ours is not None and theirs is not None
    assert minus_gate(found, dense) is None and minus_gate(found, theirs) is None
    apart = minus_gate(found, ours)
    assert apart is not None and apart.mean == pytest.approx(ours.metrics["kl"] - theirs.metrics["kl"])
    each = [
        torch.tensor([sum(text["kl"]) / STEPS for text in store.read_samples(runs / name)], dtype=torch.float64)
        for name in ("gate-16-mine", "gate-16-msa")
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
