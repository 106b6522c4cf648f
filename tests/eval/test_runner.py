from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from seergate.errors import SeergateError
from seergate.eval import MethodSpec, RunOptions, Sampling, evaluate, make_task, sweep
from seergate.eval.settings import grid
from tests.eval import killed_run, support

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {
    "task",
    "problem_id",
    "sample_idx",
    "seed",
    "prompt",
    "completion",
    "n_tokens",
    "finish_reason",
    "pred",
    "gold",
    "correct",
    "density",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return support.save(tmp_path_factory.mktemp("model"))


def small(out, spec=None, **options):
    task = make_task("chain_sum", problems=4, variables=5)
    given = RunOptions(**{"max_new_tokens": 36, "batch_size": 2, **options})
    return evaluate(support.model(), support.tokenizer(), task, spec or MethodSpec("dense"), out, given)


def samples(out):
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


def timeless(metrics):
    return {k: v for k, v in metrics.items() if k not in ("seconds", "tokens_per_second") and "resident" not in k}


def test_a_run_directory_holds_what_it_should(tmp_path):
    metrics = small(tmp_path, MethodSpec("oracle", 32, 16))
    rows = samples(tmp_path)
    assert len(rows) == 4
    assert all(set(row) >= FIELDS for row in rows)
    assert all(0 < row["density"] < 1 for row in rows)
    assert json.loads((tmp_path / "metrics.json").read_text()) == metrics
    assert metrics["truncation_rate"] == 1.0
    assert metrics["mean_tokens"] == 36
    assert metrics["max_tokens"] == 36
    assert metrics["n_problems"] == 4
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert config["method"]["name"] == "oracle"
    assert (config["method"]["token_budget"], config["method"]["block_size"]) == (32, 16)
    assert config["generation"]["max_new_tokens"] == 36
    assert {"torch", "transformers", "git", "hardware"} <= set(config["environment"])


def test_kill_and_resume_gives_the_uninterrupted_result(tmp_path, saved):
    """SIGKILL in the middle, at whatever point of a batch; then a truncated line; then to the end."""
    whole = killed_run.run(str(saved), str(tmp_path / "whole"))
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "tests.eval.killed_run", str(saved), str(out)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 120
    path = out / "samples.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < 5:
        assert process.poll() is None, process.stderr.read().decode()[-2000:]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()
    with path.open("ab") as file:
        file.write(b'{"task": "chain_sum", "problem_id": "6-3-')  # a kill inside a write
    assert 5 <= path.read_bytes().count(b"\n") < 24
    resumed = killed_run.run(str(saved), str(out))
    rows, expected = samples(out), samples(tmp_path / "whole")
    keys = [(row["task"], row["problem_id"], row["sample_idx"]) for row in rows]
    assert len(keys) == len(set(keys)) == 24

    def answers(of):
        return {(r["problem_id"], r["sample_idx"]): r["completion"] for r in of}

    assert answers(rows) == answers(expected)
    for name in ("accuracy", "accuracy_se", "mean_tokens", "max_tokens", "truncation_rate", "n_samples", "n_problems"):
        assert resumed[name] == whole[name]


def test_a_finished_run_is_not_generated_again(tmp_path):
    first = small(tmp_path)
    before = (tmp_path / "samples.jsonl").read_bytes()
    calls = []
    assert timeless(small(tmp_path, on_progress=calls.append)) == timeless(first)
    assert (tmp_path / "samples.jsonl").read_bytes() == before
    assert calls == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_new_tokens": 35}, "generation.max_new_tokens was 36 and is 35"),
        ({"seed": 1}, "generation.seed was 0 and is 1"),
        ({"samples": 2}, "generation.samples"),
        ({"sampling": Sampling(temperature=0.6)}, "generation.temperature"),
        ({"spec": MethodSpec("oracle", 64, 16)}, "method.name was 'dense' and is 'oracle'"),
    ],
)
def test_other_settings_are_refused(tmp_path, change, field):
    small(tmp_path)
    with pytest.raises(SeergateError, match=field):
        small(tmp_path, **change)


def test_other_weights_are_refused(tmp_path):
    small(tmp_path)
    model = support.model()
    model.lm_head.weight.data[3, 3] += 1
    task = make_task("chain_sum", problems=4, variables=5)
    with pytest.raises(SeergateError, match=r"model\.fingerprint"):
        evaluate(model, support.tokenizer(), task, MethodSpec("dense"), tmp_path, RunOptions(max_new_tokens=36))


def test_batch_size_may_differ_on_resume_but_versions_may_not(tmp_path):
    small(tmp_path)
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    assert small(tmp_path, batch_size=4)["n_samples"] == 4
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    config = tmp_path / "config.yaml"
    config.write_text(config.read_text().replace("transformers: ", "transformers: 0."))
    with pytest.raises(SeergateError, match=r"environment\.transformers"):
        small(tmp_path)


def test_damage_is_told(tmp_path):
    small(tmp_path)
    path = tmp_path / "samples.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + "rubbish\n" + lines[1])
    with pytest.raises(SeergateError, match="line 2 is damaged"):
        small(tmp_path)
    path.write_text(lines[0] + lines[1] + lines[0])
    with pytest.raises(SeergateError, match="line 3 repeats"):
        small(tmp_path)


def test_two_writers_are_refused(tmp_path):
    from seergate.eval.store import SampleLog

    with SampleLog(tmp_path), pytest.raises(SeergateError, match="another process"):
        small(tmp_path)


def test_metrics_do_not_depend_on_the_order_of_samples(tmp_path):
    first = small(tmp_path)
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    assert timeless(small(tmp_path)) == timeless(first)


def test_sweep_measures_recall_on_one_set_of_contexts(tmp_path):
    task = make_task("chain_sum", problems=3, variables=12)
    specs = grid(["random", "dense", "oracle", "streaming_llm"], [48, 4096], 16)
    assert specs[0].label == "dense"
    options = RunOptions(max_new_tokens=64, batch_size=3, measure_recall=True)
    results = sweep(support.model(), support.tokenizer(), task, specs, tmp_path, options)
    assert set(results) == {
        "dense",
        "random-48",
        "random-4096",
        "oracle-48",
        "oracle-4096",
        "streaming_llm-48",
        "streaming_llm-4096",
    }
    assert results["random-48"]["recall"] < results["oracle-48"]["recall"] < 1
    assert results["oracle-4096"]["recall"] == results["random-4096"]["recall"] == pytest.approx(1.0)
    assert results["dense"]["recall"] is None
    assert results["dense"]["next_token_kl"] == pytest.approx(0.0, abs=1e-5)
    assert results["dense"]["agreement"] == 1.0
    assert 0 < results["oracle-48"]["next_token_kl"] < results["random-48"]["next_token_kl"]
    assert results["random-4096"]["next_token_kl"] == pytest.approx(0.0, abs=1e-5)
    assert results["streaming_llm-48"]["next_token_kl"] > 1e-3  # measured for what evicts, too
    assert results["random-48"]["dense_perplexity"] == pytest.approx(results["dense"]["perplexity"])
    assert results["random-48"]["perplexity"] > results["dense"]["perplexity"]  # greedy text is what dense expects
    assert len(results["oracle-48"]["recall_per_layer"]) == 2
    dense = {s["problem_id"]: s["completion"] for s in samples(tmp_path / "dense")}
    for label in (
        "oracle-4096",
        "random-4096",
        "streaming_llm-4096",
    ):  # a budget that covers everything changes nothing
        assert {s["problem_id"]: s["completion"] for s in samples(tmp_path / label)} == dense
    assert {s["problem_id"]: s["completion"] for s in samples(tmp_path / "random-48")} != dense


def test_settings_are_checked_before_work(tmp_path):
    task = make_task("chain_sum", problems=1, variables=5)
    arguments = (support.model(), support.tokenizer(), task)
    for specs, said in (
        ([MethodSpec("gate", 64)], "needs gates"),
        ([MethodSpec("quest", 8, 16)], "token_budget is 8"),
        ([MethodSpec("dense"), MethodSpec("dense")], "given twice"),
    ):
        with pytest.raises(ValueError, match=said):
            sweep(*arguments, specs, tmp_path / "out", RunOptions())
    assert not (tmp_path / "out").exists()
    with pytest.raises(SeergateError, match="needs a token budget"):
        MethodSpec("oracle")
    with pytest.raises(SeergateError, match="did you mean 'quest'"):
        MethodSpec("qest", 64)
    with pytest.raises(ValueError, match="batch_size is 0"):
        evaluate(*arguments, MethodSpec("dense"), tmp_path / "out", replace(RunOptions(), batch_size=0))
