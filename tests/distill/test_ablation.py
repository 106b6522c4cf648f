"""Studies: what ships is valid, variants are compared on the same packs, and a study goes on where it stopped."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seergate.cli.main import main
from seergate.distill import TrainConfig
from seergate.distill.ablation import Study, load_study, run_study, studies, table, variant_configs
from seergate.errors import SeergateError
from tests.distill.test_trainer import config, model_dir, pushes  # noqa: F401 (fixtures)

ASKED_FOR = {"block-size", "k-pooling", "q-pooling", "rope", "qk-norm", "loss-rows"}


def options_of(config: TrainConfig, **changes: Any) -> dict[str, Any]:  # noqa: F811
    return {**config.to_dict(), "max_steps": 3, "recall_budgets": (64,), **changes}


@pytest.mark.parametrize("name", sorted(studies()))
def test_a_shipped_study_can_run_on_the_tiny_reasoner(name: str) -> None:
    study = load_study(name)
    configs = variant_configs(study, "tiny-reasoner", {})
    assert len(configs) >= 2 and len({str(c.result_shaping()) for c in configs.values()}) == len(configs)
    first = next(iter(configs.values())).to_dict()
    for variant, run in configs.items():
        given = study.variants[variant]
        assert TrainConfig.from_dict({**run.to_dict(), **given}) == run
        differ = {k for k, v in run.to_dict().items() if v != first[k]}
        assert differ <= {*given, "output_dir"}  # nothing else varies


def test_the_studies_of_the_paper_ship() -> None:
    assert set(studies()) >= ASKED_FOR
    sizes = [v["block_size"] for v in load_study("block-size").variants.values()]
    assert sizes == [16, 32, 64, 128]


def test_a_study_ends_in_a_table_and_goes_on_where_it_stopped(config: TrainConfig) -> None:  # noqa: F811
    study = Study(
        "pooling", {"learning_rate": 5e-3}, {"max": {"k_pooling": "max"}, "all three": {"k_pooling": "max,min,avg"}}
    )
    configs = variant_configs(study, config.model, options_of(config))
    first = run_study(study, configs)
    assert [o.variant for o in first] == ["max", "all three"] and first[0].parameters < first[1].parameters
    assert first[0].kl != first[1].kl and all(0 < o.recall[64] < 1 and o.seconds > 0 for o in first)
    lines = table(study, first).splitlines()
    assert [cell.strip() for cell in lines[0].split("|")[1:-1]] == [
        "variant", "parameters", "held-out KL", "recall at 64", "s/step",
    ]  # fmt: skip
    assert len({len(line) for line in lines}) == 1 and f"{first[1].kl:.4f}" in lines[3]

    stamps = {p: p.stat().st_mtime_ns for c in configs.values() for p in c.run_dir.rglob("*")}
    assert run_study(study, configs) == first
    assert stamps == {p: p.stat().st_mtime_ns for c in configs.values() for p in c.run_dir.rglob("*")}
    with pytest.raises(
        SeergateError, match="learning_rate=0.01 and this run has 0.02"
    ):  # the user's option won over the study's
        run_study(study, variant_configs(study, config.model, options_of(config, learning_rate=2e-2)))


def test_the_variants_of_a_study_share_their_commits(
    config: TrainConfig,  # noqa: F811
    pushes: list[TrainConfig],  # noqa: F811
) -> None:
    study = Study("pooling", {}, {"max": {"k_pooling": "max"}, "min": {"k_pooling": "min"}})
    options = options_of(config, data="org/rows", data_revision="main", max_steps=1)
    configs = variant_configs(study, config.model, options)

    def commits(directory: Path) -> list[str]:
        runs = [json.loads((directory / name / "ablation.json").read_text())["config"] for name in ("max", "min")]
        return [run["data_revision"] for run in runs]

    home = configs["min"].run_dir.parent
    outcomes = run_study(study, configs)
    assert commits(home) == ["a" * 40] * 2 and [one.data_revision for one in pushes] == ["a" * 40] * 2
    shutil.rmtree(configs["min"].run_dir)  # as if it had ended after the first, hours ago
    assert run_study(study, configs)[0] == outcomes[0] and commits(home) == ["a" * 40] * 2 and len(pushes) == 3

    (home / "commits.json").write_text("{}")
    with pytest.raises(SeergateError, match="made with data_revision='aaaa.*and this run has 'bbbb"):
        run_study(study, configs)
    again = {name: replace(one, resume=False) for name, one in configs.items()}
    run_study(study, again)
    assert commits(home) == ["c" * 40] * 2


def test_rows_that_teach_are_compared_on_the_same_rows(config: TrainConfig) -> None:  # noqa: F811
    study = load_study("loss-rows")
    options = options_of(config, learning_rate=1e-30, min_lr=0.0)
    del options["row_start"], options["eval_row_start"]
    outcomes = run_study(study, variant_configs(study, config.model, options))
    assert max(o.kl for o in outcomes) == pytest.approx(min(o.kl for o in outcomes), rel=1e-6)  # nothing was learned


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (
            "variants: {a: {block_siz: 8}}",
            "variant 'a' of own cannot run: 'block_siz' is not an option of training; did",
        ),
        ("variants: {a: {block_size: 7}}", "variant 'a' of own cannot run: block_size is 7"),
        ("variants: [a, b]", "is no study"),
        ("variants: {a: {}}", "is no study"),
        ("other: 1", "is no study"),
        ("variants: {a-b: {learning_rate: 0.1}, a_b: {learning_rate: 0.2}}", "differ in punctuation only"),
        ("options: {eval_packs: 0}\nvariants: {a: {learning_rate: 0.1}}", "eval_packs and eval_steps must not be 0"),
    ],
)
def test_a_study_that_cannot_run_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, why: str
) -> None:
    (tmp_path / "own.yaml").write_text(content)
    assert main(["ablate", str(tmp_path / "own.yaml"), "--model", "tiny-reasoner"]) == 2
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1


def test_an_unknown_study_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", "blocksize"]) == 2
    assert "there is no study 'blocksize'; did you mean 'block-size'?" in capsys.readouterr().err


def test_all_studies_can_be_listed_without_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", "all", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert all(f"{name}: runs/ablation-{name}-tiny-reasoner/" in out for name in studies())
