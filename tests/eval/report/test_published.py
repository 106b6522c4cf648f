"""The paper's numbers stand beside ours where it ran the same, and nowhere else."""

import re
from functools import cache

import pytest

from seergate import GateBank, GateConfig
from seergate.eval.report import write_report
from seergate.eval.report.published import PROBLEMS, deviations, published, table_1
from seergate.eval.settings import MethodSpec
from seergate.eval.tasks.hub_tasks import HUB_TASKS
from tests.support.made_reports import reconfigure, write_run
from tests.support.models import tiny_model

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


def unknown(config):
    return published(config) is table_1(config) is None


def config_of(spec, bank, **others):
    return {"task": AIME, "model": MODEL, "generation": PAPER, **others, "method": spec.describe(bank)}


def write(root, spec, bank, task=AIME, path="Qwen/Qwen3-8B", right=21, n=30, how=ONE):
    """A run of a setting as it is recorded, with so many right answers of ``n``."""
    run_dir = write_run(root / "new", spec.name, None, lambda i: i < right, n=n, task=task, model=path, generation=how)
    reconfigure(run_dir, method=spec.describe(bank))
    return run_dir.rename(root / spec.label)


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
    other = {"model": MODEL | {"path": "checkpoints/DeepSeek-R1-Distill-Qwen-14B"}}
    assert published(config_of(MethodSpec("gate", 8192), gates, **other)) == 67.45


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
    assert unknown(config_of(spec, bank(size)))


@pytest.mark.parametrize(
    "others",
    [
        *({"task": AIME | other} for other in ({"problems": 5}, {"name": "gpqa_diamond"}, {"n_problems": 2})),
        *({"task": AIME | other} for other in ({"grader": "exact"}, {"n_problems": None}, {"shots": 4})),
        {"model": MODEL | {"path": "Qwen/Qwen3-32B"}},
        {"generation": PAPER | {"max_new_tokens": 64}},
        {"generation": PAPER | {"max_new_tokens": 32768, "max_total_tokens": None}},
        {"generation": PAPER | {"max_total_tokens": 16384}},
        {"generation": PAPER | {"temperature": 0.0}},
    ],
    ids=str,
)
def test_other_models_tasks_and_ways_of_asking_have_none(others, bank):
    if others.get("task", AIME)["n_problems"] is None:
        others["task"].pop("n_problems")
    for spec in (MethodSpec("dense"), MethodSpec("gate", 4096), MethodSpec("quest", 4096, 64)):
        assert unknown(config_of(spec, bank(64), **others))


def test_a_smaller_model_has_the_numbers_of_its_gates(bank):
    smaller = {"model": MODEL | {"path": "Qwen/Qwen3-4B"}}
    assert published(config_of(MethodSpec("quest", 4096, 64), bank(64), **smaller)) is None
    assert published(config_of(MethodSpec("gate", 4096), bank(64), **smaller)) == 69.32


def test_what_was_sampled_or_is_done_otherwise_is_said():
    assert deviations(config_of(MethodSpec("dense"), None)) == []
    assert deviations(config_of(MethodSpec("quest", 4096, 64), None)) == ["pages chosen per KV head, not query head"]
    own = config_of(MethodSpec("quest", 4096, 64, options={"group_reduction": "separate"}), None)
    assert published(own) == 44.2 and deviations(own) == []
    config = config_of(MethodSpec("dense"), None, generation=PAPER | {"samples": 8, "temperature": 1.0, "top_k": 20})
    assert published(config) == 74.48
    expected = ["samples 8 instead of 64", "temperature 1 instead of 0.6", "top-k 20 instead of 0"]
    assert deviations(config) == expected


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
        row = (
            r"\| gate +\| +4096 \| +70\.0 \(52\.1 to 83\.3\) \| +71\.[34] \| +-1\.[34] \| +samples 1 instead of 64 \|"
        )
        assert bool(re.search(row, text)) == (name == "same")
        assert ("## Beside the published numbers" in text) == (name in ("same", "blocks")), "dense is dense"
    write(tmp_path / "tiny", MethodSpec("dense"), None, path="tiny-reasoner")
    assert "published numbers" not in write_report(tmp_path / "tiny").markdown.read_text()


def test_nothing_stands_beside_an_unfinished_run(tmp_path, bank):
    """20 answers of 30: whether the rest is as hard is not known."""
    for spec in (MethodSpec("dense"), MethodSpec("gate", 4096), MethodSpec("gate", 6144)):
        write(tmp_path, spec, bank(64), n=20, right=14)
    text = write_report(tmp_path).markdown.read_text()
    assert "gate at 4096 is unfinished: 20 samples so far" in text and "published" not in text
