"""The paper's numbers stand beside ours where it ran the same, and nowhere else."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from seergate import GateBank, GateConfig
from seergate.cli.papers import FIGURES
from seergate.eval.hub_tasks import HUB_TASKS
from seergate.eval.settings import MethodSpec, grid
from seergate.report import load_sweeps, write_report
from seergate.report.figures import LOOKS, beside
from seergate.report.plots import draw_published, pyplot
from seergate.report.published import PROBLEMS, deviations, published, table_1
from tests.models import tiny_model
from tests.report.made import write_run

AIME = {"name": "aime24", "problems": None, "n_problems": 30, "contents": "c", "chance": None, "grader": "math"}
PAPER = {
    **{"samples": 64, "max_new_tokens": None, "max_total_tokens": 32768, "seed": 0},
    **{"temperature": 0.6, "top_k": 0, "top_p": 0.95, "min_p": 0.0},
}
ONE = PAPER | {"samples": 1}
"""As the paper ran it, but one answer per problem."""
MODEL = {"path": "Qwen/Qwen3-8B", "type": "qwen3", "parameters": 1, "dtype": "bfloat16", "fingerprint": "f"}


@pytest.fixture(scope="module")
def bank():
    """Block size -> gates; no more of them matters to what is recorded of a method."""
    return cache(lambda size: GateBank.for_model(tiny_model("qwen3"), GateConfig(block_size=size, gate_dim=16)))


def config_of(spec: MethodSpec, bank, **others):
    return {"task": AIME, "model": MODEL, "generation": PAPER, **others, "method": spec.describe(bank)}


def write(root: Path, spec: MethodSpec, bank, task=AIME, path="Qwen/Qwen3-8B", right=21, n=30, how=ONE) -> Path:
    """A run of a setting as it is recorded, with so many right answers of ``n``."""
    found = write_run(root / "new", spec.name, None, lambda i: i < right, n=n, task=task, model=path, generation=how)
    described = yaml.safe_load((found / "config.yaml").read_text()) | {"method": spec.describe(bank)}
    (found / "config.yaml").write_text(yaml.safe_dump(described))
    return found.rename(root / spec.label)


def test_what_the_paper_ran_has_its_number(bank):
    gates = bank(64)
    for spec, value in (
        (MethodSpec("dense"), 74.48),
        (MethodSpec("gate", 2048), 58.23),
        (MethodSpec("gate", 4096), 71.35),
        (MethodSpec("gate", 4096, dense_layers=(), options={"compat": "published"}), 71.35),
        (MethodSpec("quest", 4096, 64), 44.2),
    ):
        assert published(config_of(spec, gates)) == value, spec
    assert table_1(config_of(MethodSpec("gate", 4096), gates)) == (72.3, 16.3)
    assert table_1(config_of(MethodSpec("dense"), gates)) == (74.5, 15.1)
    other = config_of(
        MethodSpec("gate", 8192), gates, model=MODEL | {"path": "checkpoints/DeepSeek-R1-Distill-Qwen-14B"}
    )
    assert published(other) == 67.45


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        (MethodSpec("gate", 4096), 16),
        (MethodSpec("gate", 4096, dense_layers=(0, 1)), 64),
        (MethodSpec("gate", 4096, options={"sink_blocks": 1}), 64),
        (MethodSpec("gate", 4096, options={"rectify_every": 32}), 64),
        (MethodSpec("gate", 3072), 64),
        (MethodSpec("gate", options={"threshold": 0.004}), 64),
        (MethodSpec("gate", options={"top_p": 0.95}), 64),
        (MethodSpec("quest", 4096, 16), 64),
        (MethodSpec("quest", 4096, 64, (0, 1)), 64),
        (MethodSpec("quest", 4096, 64, options={"group_reduction": "mean"}), 64),
        (MethodSpec("oracle", 4096, 64), 64),
        (MethodSpec("h2o", 4096), 64),
        (MethodSpec("h2o+gate", 4096, options={"read_budget": 2048}), 64),
        (MethodSpec("reason_cache+gate", 4096), 64),
    ],
    ids=lambda value: value.label if isinstance(value, MethodSpec) else None,
)
def test_what_the_paper_did_not_run_has_none(spec, size, bank):
    assert published(config_of(spec, bank(size))) is None
    assert table_1(config_of(spec, bank(size))) is None


def test_other_models_tasks_and_parts_of_a_task_have_none(bank):
    gates = bank(64)
    for others in (
        {"task": AIME | {"problems": 5}},
        {"task": AIME | {"name": "gpqa_diamond"}},
        {"model": MODEL | {"path": "Qwen/Qwen3-32B"}},
    ):
        for spec in (MethodSpec("dense"), MethodSpec("gate", 4096), MethodSpec("quest", 4096, 64)):
            assert published(config_of(spec, gates, **others)) is None
            assert table_1(config_of(spec, gates, **others)) is None
    smaller = {"model": MODEL | {"path": "Qwen/Qwen3-4B"}}
    assert published(config_of(MethodSpec("quest", 4096, 64), gates, **smaller)) is None
    assert published(config_of(MethodSpec("gate", 4096), gates, **smaller)) == 69.32


@pytest.mark.parametrize(
    "others",
    [
        {"task": AIME | {"n_problems": 2}},
        {"task": {key: value for key, value in AIME.items() if key != "n_problems"}},
        {"task": AIME | {"grader": "exact"}},
        {"generation": PAPER | {"max_new_tokens": 64}},
        {"generation": PAPER | {"max_new_tokens": 32768, "max_total_tokens": None}},
        {"generation": PAPER | {"max_total_tokens": 16384}},
        {"generation": PAPER | {"temperature": 0.0}},
    ],
    ids=str,
)
def test_what_was_not_asked_as_the_paper_asked_it_has_none(others, bank):
    for spec in (MethodSpec("dense"), MethodSpec("gate", 4096), MethodSpec("quest", 4096, 64)):
        assert published(config_of(spec, bank(64), **others)) is None
        assert table_1(config_of(spec, bank(64), **others)) is None


def test_what_was_sampled_otherwise_is_said(bank):
    assert deviations(config_of(MethodSpec("dense"), None)) == []
    config = config_of(MethodSpec("dense"), None, generation=PAPER | {"samples": 8, "temperature": 1.0, "top_k": 20})
    assert published(config) == 74.48
    said = ["samples 8 instead of 64", "temperature 1 instead of 0.6", "top-k 20 instead of 0"]
    assert deviations(config) == said


def test_the_paper_s_tasks_are_those_that_are_made_here():
    assert set(PROBLEMS) <= set(HUB_TASKS)
    assert [HUB_TASKS[name].samples for name in PROBLEMS] == [64, 64, 8, 16]


def test_the_table_of_a_report(tmp_path, bank):
    for name, size, task in (
        ("same", 64, AIME),
        ("blocks", 16, AIME),
        ("part", 64, AIME | {"problems": 5}),
        ("other", 64, AIME | {"name": "gpqa_diamond"}),
    ):
        write(tmp_path / name, MethodSpec("dense"), None, task, right=22)
        write(tmp_path / name, MethodSpec("gate", 4096), bank(size), task)
        text = write_report(tmp_path / name).markdown.read_text()
        # 21 of 30: Wilson (.7 + .064 ± 1.96 sqrt(.7 * .3 / 30 + .00107)) / 1.128; published 71.35
        row = re.search(
            r"\| gate +\| +4096 \| +70\.0 \(52\.1 to 83\.3\) \| +71\.[34] \| +-1\.[34] \| +samples 1 instead of 64 \|",
            text,
        )
        assert bool(row) == (name == "same")
        assert ("## Beside the published numbers" in text) == (name in ("same", "blocks")), "dense is dense"
    write(tmp_path / "tiny", MethodSpec("dense"), None, path="tiny-reasoner")
    assert "published numbers" not in write_report(tmp_path / "tiny").markdown.read_text()


def test_nothing_stands_beside_an_unfinished_run(tmp_path, bank):
    """20 answers of 30: whether the rest is as hard is not known."""
    for spec in (MethodSpec("dense"), MethodSpec("gate", 4096), MethodSpec("gate", 6144)):
        write(tmp_path, spec, bank(64), n=20, right=14)
    report = write_report(tmp_path)
    text = report.markdown.read_text()
    assert "gate at 4096 is unfinished: 20 samples so far" in text and "published" not in text
    assert "published" not in (tmp_path / "accuracy.svg").read_text()
    (sweep,) = load_sweeps(tmp_path)
    assert "74.5" not in LOOKS["length_table"].table(sweep)


def test_numbers_of_the_other_papers_stand_beside_what_they_ran(tmp_path, bank):
    """Table 1 of RPC, with another limit; half of the problems, and what is unfinished, has none."""
    figure, long = FIGURES["rpc-table1"], PAPER | {"max_new_tokens": 32768, "max_total_tokens": None}
    model = "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"
    specs = [*grid(figure.real["method"], figure.real["budget"], 64), MethodSpec("h2o", 4096)]
    for name, task, how in (
        ("same", AIME, long | {"samples": 1}),
        ("short", AIME, long | {"samples": 1, "max_new_tokens": 8192}),
        ("half", AIME | {"problems": 15, "n_problems": 15}, long | {"samples": 1}),
        ("unfinished", AIME, long),
    ):
        for spec in specs:
            write(tmp_path / name, spec, None, task, model, right=9, n=task["n_problems"], how=how)
        (sweep,) = load_sweeps(tmp_path / name)
        found = [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in beside(sweep, figure.published, figure.real).splitlines()[2:]
        ]
        if name in ("half", "unfinished"):
            assert found == []
            continue
        # 9 of 30: Wilson (.3 + .064 ± 1.96 sqrt(.3 * .7 / 30 + .00107)) / 1.128
        unlike = "–" if name == "same" else "max-new-tokens 8192 instead of 32768"
        assert found == [
            ["dense", "–", "30.0 (16.7 to 47.9)", "55.5", "-25.5", unlike],
            ["h2o", "3417", "30.0 (16.7 to 47.9)", "42.5", "-12.5", unlike],
            ["tova", "3417", "30.0 (16.7 to 47.9)", "42.5", "-12.5", unlike],
            ["rpc, interval=1024", "1/4 of the answer", "30.0 (16.7 to 47.9)", "50.4", "-20.4", unlike],
            ["rpc, interval=4096", "1/4 of the answer", "30.0 (16.7 to 47.9)", "52.9", "-22.9", unlike],
        ]


def test_what_quest_does_unlike_the_paper_is_said(bank):
    assert deviations(config_of(MethodSpec("quest", 4096, 64), None)) == ["pages chosen per KV head, not query head"]
    own = config_of(MethodSpec("quest", 4096, 64, options={"group_reduction": "separate"}), None)
    assert published(own) == 44.2 and deviations(own) == []


def runs_of(name: str, root: Path, bank) -> Path:
    """Runs of all settings of a figure, as `seergate figure` makes them for Qwen3-8B on AIME24."""
    run = FIGURES[name].real
    sizes = run.get("block_size", [64])
    layers = [tuple(choice) for choice in run["dense_layers"]] if "dense_layers" in run else [None]
    for spec in grid(run["method"], run.get("budget", [2048, 4096]), sizes, layers, run.get("threshold")):
        write(root, spec, bank(spec.block_size) if spec.has_gates else None)
    return root


@pytest.mark.parametrize(
    ("name", "drawn"),
    [
        ("4", {"dense"}),
        ("5", {"dense", "gate", "quest"}),
        ("7", {"dense", "gate", "quest"}),
        ("8", {"dense", "gate", "quest"}),
        ("9", {"dense"}),
    ],
)
def test_figures_have_the_numbers_that_are_known(name, drawn, tmp_path, bank):
    """Figure 8, for one, whose series are named "gate, all sparse" and "gate, layers 0,1 dense"."""
    (sweep,) = load_sweeps(runs_of(name, tmp_path, bank))
    draw = LOOKS[FIGURES[name].look].draw
    assert draw is not None
    text = draw(sweep, tmp_path / "figure.png").with_suffix(".svg").read_text()
    assert set(re.findall(r"<!-- (\w+), published -->", text)) == drawn


def test_they_are_drawn_where_ours_stand(tmp_path, bank):
    (sweep,) = load_sweeps(runs_of("7", tmp_path, bank))
    figure, axis = pyplot().subplots()
    draw_published(axis, sweep, [(s.block_size or 0, s) for s in sweep.settings if s.budget is not None])
    lines = {str(line.get_label()): line.get_xydata().tolist() for line in axis.lines}
    pyplot().close(figure)
    assert lines["gate, published"] == [[64, 71.35]] and lines["quest, published"] == [[64, 44.2]]
    assert [y for _, y in lines["dense, published"]] == [74.48, 74.48]


def test_lengths_stand_beside_those_of_table_1(tmp_path, bank):
    write(tmp_path, MethodSpec("dense"), None)
    write(tmp_path, MethodSpec("gate", 4096), bank(64))
    write(tmp_path, MethodSpec("gate", 8192, dense_layers=(0, 1)), bank(64))
    write(tmp_path, MethodSpec("quest", 4096, 16), None)
    (sweep,) = load_sweeps(tmp_path)
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in LOOKS["length_table"].table(sweep).splitlines()
    ]
    beside = {(row[0], row[1]): row[4:] for row in rows[2:]}
    assert beside == {
        ("dense", "–"): ["74.5", "15.1k", "samples 1 instead of 64"],
        ("gate, all sparse", "4096"): ["72.3", "16.3k", "samples 1 instead of 64"],
        ("gate, layers 0,1 dense", "8192"): ["–", "–", "–"],
        ("quest", "4096"): ["–", "–", "–"],
    }
