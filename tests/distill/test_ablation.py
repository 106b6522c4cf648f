"""Studies: what ships is valid, variants are compared on the same packs, and a study goes on where it stopped."""

import contextlib
import gc
import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch

from seergate.distill import TrainConfig, run_distillation, training_run
from seergate.distill.ablation import Outcome, Study, load_study, run_studies, studies, table, variant_configs
from seergate.distill.callbacks import StepLog
from seergate.distill.config import MAX_LENGTH
from seergate.distill.distributed import CommonError
from seergate.distill.stopping import Stopped
from seergate.distill.trainer import run_together
from seergate.errors import SeergateError
from tests.distill.conftest import Recorder, Signalled, assert_identical, assert_same, watched_steps, weights
from tests.support.made_reports import cells
from tests.support.running import output_of, refusal, refused, run_seergate


def run_study(study: Study, configs: dict[str, TrainConfig]) -> list[Outcome]:
    return run_studies([(study, configs)])[0]


def options_of(config: TrainConfig, **changes: Any) -> dict[str, Any]:
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


def test_a_study_ends_in_a_table_and_goes_on_where_it_stopped(config, monkeypatch):
    variants = {name: {"k_pooling": kinds} for name, kinds in (("max", "max"), ("all three", "max,min,avg"))}
    study = Study("pooling", {"learning_rate": 5e-3}, variants)
    configs = variant_configs(study, config.model, options_of(config))
    first = run_study(study, configs)
    assert [o.variant for o in first] == ["max", "all three"] and first[0].parameters < first[1].parameters
    assert [o.tokens for o in first] == [first[0].tokens] * 2 and first[0].tokens > 0
    assert first[0].kl != first[1].kl and all(0 < o.recall[64] < 1 for o in first)
    lines = table(study, first).split("\n\n")[0].splitlines()
    assert cells(lines[0]) == [["variant", "parameters", "tokens", "held-out KL", "recall at 64"]]
    assert len({len(line) for line in lines}) == 1 and f"{first[1].kl:.4f}" in lines[3]
    said = "The held-out packs of the variants may differ."
    seeds = Study("seeds", {}, {"max": {"seed": 0}, "all three": {"seed": 1}})
    assert said in table(seeds, first) and said not in table(study, first)
    for options, other in (
        ({"scorer": "trim_kv"}, "Retention gates"),
        ({"row_stride": 64}, "evaluated on other rows"),
    ):
        assert other in table(Study("s", {}, {"a": options}), first) and other not in table(seeds, first)
    assert "Retention" not in table(load_study("scorer"), first)

    (configs["max"].run_dir / "gate_model.safetensors").write_bytes(b"half")
    seen = watched_steps(monkeypatch)
    assert run_study(study, configs) == first and not seen, "it has ended"
    with pytest.raises(SeergateError, match="learning_rate=0.01 and this run has 0.02"):  # the user's option wins
        run_study(study, variant_configs(study, config.model, options_of(config, learning_rate=2e-2)))


def test_an_ended_study_is_evaluated_again_where_that_is_not_recorded(config, monkeypatch):
    study = Study("s", {}, {"max": {"k_pooling": "max"}, "min": {"k_pooling": "min"}})

    def outcomes(**changes: Any) -> list[Outcome]:
        return run_study(study, variant_configs(study, config.model, options_of(config, **changes)))

    first = outcomes()
    run = variant_configs(study, config.model, options_of(config))["max"].run_dir
    (file,) = run.glob("checkpoints/*/state.json")
    record = json.loads(file.read_text())
    for name in ("held_out_recall", "held_out_row_start"):  # as in checkpoints of earlier versions
        del record["progress"][name]
    file.write_text(json.dumps(record))
    before, seen = weights(run), watched_steps(monkeypatch)
    assert outcomes() == first and len(seen) == config.eval_packs
    other = outcomes(recall_budgets=(32, 64))
    assert [o.recall.keys() for o in other] == [{32, 64}] * 2 and other[0].recall[64] == first[0].recall[64]
    assert [a.kl != b.kl for a, b in zip(first, outcomes(eval_row_start=0.9), strict=True)] == [True, True]
    assert_identical(weights(run), before)


def test_packs_per_step_of_a_variant_have_an_effect(config: TrainConfig) -> None:
    study = Study("packs", {}, {"two": {"packs_per_step": 2}, "four": {"packs_per_step": 4}})
    configs = variant_configs(study, config.model, options_of(config, gradient_accumulation_steps=1))
    assert [each.in_processes(1).packs_per_step for each in configs.values()] == [2, 4]
    study = Study("packs", {"gradient_accumulation_steps": 4}, {"a": {"rope": False}})
    (one,) = variant_configs(study, config.model, options_of(config, packs_per_step=2)).values()
    assert one.in_processes(1).packs_per_step == 2


def test_a_variant_may_have_a_model_of_its_own(config: TrainConfig) -> None:
    study = Study("s", {}, {"a": {"model": config.model}, "b": {"seed": 1}})
    configs = variant_configs(study, "tiny-reasoner", {}).values()
    assert [Path(each.model).name for each in configs] == [Path(config.model).name, "tiny-reasoner"]


def test_variants_without_held_out_packs_are_refused_before_training(config):
    configs = variant_configs(study := Study("s", {}, {"a": {"rope": True}}), config.model, options_of(config))
    with pytest.raises(SeergateError, match="/a has no held-out packs to compare: at most a tenth of . packs"):
        run_study(study, {"a": replace(configs["a"], data_limit=9, max_steps=1)})
    assert not (configs["a"].run_dir / "train_config.yaml").exists()


VARIANTS: dict[str, dict[str, Any]] = {
    "narrow": {"gate_dim": 8, "k_pooling": "max", "seed": 3},
    "plain": {},
    "all rows": {"row_start": 0.0, "reduction": "published", "learning_rate": 2e-3},
    "wide blocks": {"block_size": 32, "rope": False, "max_steps": 3},
    "more packs": {"packs_per_step": 3, "max_steps": 2},
    "longer packs": {"max_length": 2048, "max_steps": 2},
}
"""The second to fourth share packs, and the fourth is over sooner; the last two have packs of the same samples."""


@pytest.mark.slow
def test_runs_in_one_forward_end_as_each_does_alone(config, tmp_path, monkeypatch):
    config = replace(config, max_steps=4, eval_steps=2, save_steps=1, save_total_limit=1, recall_budgets=(64,))
    config = replace(config, max_length=1536)  # no sample is longer
    runs = {
        name: TrainConfig.from_dict({**config.to_dict(), **given, "output_dir": str(tmp_path / name)})
        for name, given in VARIANTS.items()
    }
    alone = {name: run_distillation(replace(run, output_dir=f"{run.output_dir} alone")) for name, run in runs.items()}
    seen, heard = watched_steps(monkeypatch), Recorder()
    together = {name: (run, [heard] if name == "plain" else []) for name, run in runs.items()}
    assert run_together(together) == [run.run_dir for run in runs.values()]
    for name, run in runs.items():
        assert_same(run.run_dir, alone[name])
    packs = 4 * 2 + 2 * 2  # to train and to evaluate
    alone_with_theirs = packs + (2 * 3 + 2) + (2 * 2 + 2)
    assert [log.step for log in heard.steps] == [1, 2, 3, 4]
    assert sum(len(specs) for _, specs in seen) == 2 * packs + (3 * 2 + 2 * 2) + alone_with_theirs
    assert len(seen) == packs + 2 + alone_with_theirs  # the fourth ends with an evaluation of its own


def test_runs_in_one_forward_go_on_from_where_each_stopped(config: TrainConfig, tmp_path: Path) -> None:
    config = replace(config, max_steps=6, save_steps=2, save_total_limit=1, eval_packs=0)
    first = replace(config, output_dir=str(tmp_path / "first"))
    second = replace(config, output_dir=str(tmp_path / "second"), k_pooling=("max",))
    alone = {run: run_distillation(replace(run, output_dir=f"{run.output_dir} alone")) for run in (first, second)}
    with pytest.raises(KeyboardInterrupt):
        run_distillation(first, [Recorder(5)])  # four steps are saved
    with pytest.raises(KeyboardInterrupt):
        run_distillation(second, [Recorder(3)])  # two are
    run_together({"first": (first, []), "second": (second, [])})
    for run, path in alone.items():
        assert_identical(weights(run.run_dir), weights(path))


def test_runs_in_one_forward_share_a_model(config: TrainConfig, tmp_path: Path) -> None:
    """It is whole where gates are trained through it, whichever run comes first; what needs less memory is said."""
    with pytest.raises(SeergateError, match="must have the same dtype"):
        run_together({"a": (config, []), "b": (replace(config, dtype="bfloat16"), [])})

    class Full(Recorder):
        def on_step(self, log: StepLog) -> None:
            raise torch.OutOfMemoryError

    small = replace(config, max_steps=1, packs_per_step=1, eval_packs=0)
    first = replace(small, max_length=MAX_LENGTH, output_dir=str(tmp_path / "first"))  # of which there are 2048
    second = replace(first, scorer="trim_kv", gate_dim=None, output_dir=str(tmp_path / "second"))
    with pytest.raises(SeergateError, match="a pack of 2048 tokens .* trains through the whole model; make max_leng"):
        run_together({"first": (first, [Full()]), "second": (second, [])})
    for run in (first, second):
        assert "shard_base: false" in (run.run_dir / "train_config.yaml").read_text()


def test_the_model_is_divided_where_one_of_the_runs_needs_it(config, tmp_path, monkeypatch):
    """Whichever comes first. Its gates are larger, as if in two processes with room for those of the other."""
    decide, shard_flags = training_run.decide_sharding, list[bool | None]()

    def load(path: str, config: TrainConfig, *rest: Any) -> None:
        shard_flags.append(config.shard_base)
        raise KeyboardInterrupt

    first = replace(config, output_dir=str(tmp_path / "first"))
    second = replace(first, gate_dim=4096, output_dir=str(tmp_path / "second"))
    monkeypatch.setattr(training_run, "decide_sharding", lambda m, b, c, d, _, room: decide(m, b, c, d, 2, 10**8))
    monkeypatch.setattr(training_run, "load_frozen", load)
    for runs in ({"first": first}, {"second": second}, {"first": first, "second": second}):
        with pytest.raises(KeyboardInterrupt):
            run_together({name: (run, []) for name, run in runs.items()})
    assert shard_flags == [False, True, True]


def test_a_signal_saves_all_runs(config: TrainConfig, tmp_path: Path) -> None:
    runs = [replace(config, output_dir=str(tmp_path / name), save_steps=0) for name in ("first", "second")]
    with pytest.raises(Stopped):
        run_together({"first": (runs[0], [Signalled(2, signal.SIGTERM)]), "second": (runs[1], [])})
    saved = [[path.name for path in (run.run_dir / "checkpoints").iterdir()] for run in runs]
    assert saved == [["step-00000002"], ["step-00000002"]]  # the second heard of it before its step was over


@pytest.mark.parametrize("own_model", [False, True])
def test_variants_that_diverge_end_alone_and_are_named(config: TrainConfig, model_dir, tmp_path, capsys, own_model):
    given: dict[str, Any] = {"learning_rate": 1e30, "qk_norm": False, "packs_per_step": 8}
    if own_model:
        given["model"] = str(shutil.copytree(model_dir, tmp_path / "other"))
    study = Study("rates", {}, {"huge": given, "plain": {"learning_rate": 5e-3}})
    options = options_of(config, max_steps=6, output_dir=str(tmp_path / "study"))
    diverged, plain = run_study(study, variant_configs(study, config.model, options))
    said = capsys.readouterr().out
    assert "start over with a smaller learning_rate" in said and ("this run ends here" in said) is not own_model
    assert diverged.kl != diverged.kl and 0 < plain.kl < 10 and plain.tokens
    rows = cells(table(study, [diverged, plain]).split("\n\n")[0])
    assert [rows[2][0], rows[2][3]] == ["huge", "diverged"] and rows[3][3] == f"{plain.kl:.4f}"
    assert not (tmp_path / "study" / "huge" / "gate_config.json").exists()
    alone = run_distillation(variant_configs(study, config.model, {**options, "output_dir": f"{tmp_path}/b"})["plain"])
    assert_identical(weights(tmp_path / "study" / "plain"), weights(alone))
    study = replace(study, variants={"huge": given})
    with pytest.raises(CommonError, match="^huge: step 4: 8 of 8 .*learning_rate"):
        run_study(study, variant_configs(study, config.model, options))


def test_the_frozen_model_of_a_diverged_run_is_freed_at_once(config: TrainConfig, monkeypatch):
    """Not when Python looks for cycles: another group of runs loads its own model next."""
    real, frozen = training_run.load_frozen, list[Any]()

    def load_frozen(*given: Any) -> Any:
        frozen.append(ref(base := real(*given)))
        return base

    monkeypatch.setattr(training_run, "load_frozen", load_frozen)
    study = Study("rates", {}, {"huge": {"learning_rate": 1e30, "qk_norm": False, "packs_per_step": 8}, "plain": {}})
    configs = variant_configs(study, config.model, options_of(config, max_steps=6))
    gc.disable()
    try:
        assert run_study(study, configs)[0].tokens == 0
        assert [base() for base in frozen] == [None]
    finally:
        gc.enable()


def test_the_command_trains_several_studies_at_once(config: TrainConfig, tmp_path: Path) -> None:
    for name, variants in {"one": "{a: {rope: true}, b: {rope: false}}", "two": "{c: {qk_norm: false}}"}.items():
        (tmp_path / f"{name}.yaml").write_text(f"variants: {variants}")
    config.save(tmp_path / "run.yaml")
    text = (tmp_path / "run.yaml").read_text().replace("output_dir", "# output_dir")
    (tmp_path / "run.yaml").write_text(text)
    studies = [str(tmp_path / f"{name}.yaml") for name in ("one", "two")]
    with contextlib.chdir(tmp_path):
        command = ["ablate", *studies, "--config", "run.yaml", "--max-steps", "2"]
        out = output_of(*command)
        assert output_of(*command).endswith(out[out.index("one\n\n| variant") :])
        (table_of_one,) = tmp_path.glob("runs/ablation-one-*/ablation.md")
        table_of_one.write_text("# My notes\n")
        assert "ablation.md is not the table of a study" in refusal(run_seergate(*command))
        assert table_of_one.read_text() == "# My notes\n"
    assert all(phrase in out for phrase in ("one\n\n| variant", "two\n\n| variant", "one, b: held out"))
    places = {path.parent.parent.name for path in tmp_path.glob("runs/*/*/gate_config.json")}
    assert places == {f"ablation-{name}-{Path(config.model).name.lower()}" for name in ("one", "two")}


@pytest.mark.parametrize("several", [{"WORLD_SIZE": "2"}, {}])
def test_frozen_models_one_after_another_are_refused_where_that_cannot_be(config, monkeypatch, several):
    """The second would make the process group again, hours later."""
    study = Study("s", {}, {"a": {"dtype": "float32"}, "b": {"dtype": "bfloat16"}})
    configs = variant_configs(study, config.model, options_of(config))
    for name, value in several.items():
        monkeypatch.setenv(name, value)
    if not several:
        configs = {name: replace(each, deepspeed="ds_configs/zero2.json") for name, each in configs.items()}
    refused("the runs differ in dtype, so", run_study, study, configs)


def test_later_frozen_models_are_checked_before_the_first_trains(config, tmp_path):
    """Not after it, hours later."""
    study = Study("s", {}, {"a": {"dtype": "float32"}, "b": {"dtype": "bfloat16", "data": str(tmp_path / "no.jsonl")}})
    configs = variant_configs(study, config.model, options_of(config, max_steps=1))
    refused("^b: the data file .*no.jsonl' does not exist", run_study, study, configs)
    assert not (configs["a"].run_dir / "checkpoints").exists()


def test_the_variants_of_a_study_share_their_commits(config, pushes):
    study = Study("pooling", {}, {"max": {"k_pooling": "max"}, "min": {"k_pooling": "min"}})
    options = options_of(config, data="org/rows", data_revision="main", max_steps=1)
    configs = variant_configs(study, config.model, options)

    def commits(directory: Path) -> list[str]:
        adapters = [json.loads((directory / name / "gate_config.json").read_text()) for name in ("max", "min")]
        return [adapter["training"]["config"]["data_revision"] for adapter in adapters]

    home = configs["min"].run_dir.parent
    outcomes = run_study(study, configs)
    assert commits(home) == ["a" * 40] * 2 and [one.data_revision for one in pushes] == ["a" * 40] * 2
    shutil.rmtree(configs["min"].run_dir)  # as if it had ended after the first, hours ago
    assert run_study(study, configs)[0] == outcomes[0] and commits(home) == ["a" * 40] * 2 and len(pushes) == 4

    (home / "commits.json").write_text("{}")
    refused("made with data_revision='aaaa.*and this run has 'bbbb", run_study, study, configs)
    again = {name: replace(one, resume=False) for name, one in configs.items()}
    run_study(study, again)
    assert commits(home) == ["c" * 40] * 2


NO_STUDY = {
    "variants: {a: {block_siz: 8}}": "variant 'a' of own cannot run: 'block_siz' is not an option of training; did",
    "variants: {a: {block_size: 7}}": "variant 'a' of own cannot run: block_size is 7",
    **dict.fromkeys(("variants: [a, b]", "variants: {a: {}}", "variants: {}", "other: 1"), "is no study"),
    "variants: {1: {seed: 1}, '1': {seed: 2}}": "is no study",
    "variants: {a: {seed: 1, output_dir: mine}}": "and output_dir of its variants",
    "options: {push_to_hub: org/x}\nvariants: {a: {seed: 1}}": "upload one with `seergate push`",
    "variants: {a-b: {learning_rate: 0.1}, a_b: {learning_rate: 0.2}}": "differ in punctuation only",
    "variants: {+: {seed: 1}, b: {seed: 2}}": "a variant named '+'; its name must hold",
    "options: {eval_packs: 0}\nvariants: {a: {seed: 1}}": "eval_packs and eval_steps must not be 0",
}


@pytest.mark.parametrize(("content", "why"), NO_STUDY.items())
def test_a_study_that_cannot_run_is_refused_before_training(tmp_path, content, why):
    (tmp_path / "own.yaml").write_text(content)
    assert why in refusal(run_seergate("ablate", str(tmp_path / "own.yaml"), "--model", "tiny-reasoner"))


def test_studies_of_one_name_are_refused(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "s.yaml").write_text("variants: {base: {learning_rate: 1.0e-2}, other: {seed: 1}}")
    files = [str(tmp_path / folder / "s.yaml") for folder in "ab"]
    assert "two have the same name" in refusal(run_seergate("ablate", *files, "--model", "tiny-reasoner"))


def test_the_names_of_studies():
    error = refusal(run_seergate("ablate", "blocksize"))
    assert "there is no study 'blocksize'; did you mean 'block-size'?" in error
    out = output_of("ablate", "all", "--dry-run")
    assert all(f"{name}: runs/ablation-{name}-tiny-reasoner/" in out for name in studies())


def test_rows_that_teach_are_compared_on_the_same_rows(config: TrainConfig) -> None:
    study = load_study("loss-rows")
    options = options_of(config, learning_rate=1e-30, min_lr=0.0)
    del options["row_start"], options["eval_row_start"]
    outcomes = run_study(study, variant_configs(study, config.model, options))
    assert max(o.kl for o in outcomes) == pytest.approx(min(o.kl for o in outcomes), rel=1e-6)  # nothing was learned
