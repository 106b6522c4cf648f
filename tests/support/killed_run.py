"""Kills an evaluation at random moments, starts it again, and compares what comes out with an undisturbed one.

Each start is a process of its own, which dies by SIGKILL anywhere from its first import to its last sample. Its grades
take as long as samples do, so that kills also fall between a sample's end and its grade. Run as a module, with a model
and an output directory, this is the run that is killed.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from seergate.eval import MethodSpec, RunOptions, Sampling, environment, evaluate, make_task, store
from seergate.eval.grading.graders import Grade
from seergate.eval.grading.judge import GradingPool
from tests.support.running import ROOT

TASK = {"problems": 12, "variables": 6, "seed": 3}
OPTIONS = RunOptions(samples=2, max_new_tokens=40, batch_size=2, seed=5, sampling=Sampling(temperature=1.0))
SPEC = MethodSpec("oracle", token_budget=32, block_size=16)
SAMPLES = TASK["problems"] * 2

NOT_COMPARED = ("seconds", "tokens_per_second")
"""Of samples and metrics: how long it took."""


def run(model: str, out: str) -> dict:
    """Evaluate, continuing whatever is there."""
    torch.set_num_threads(1)
    loaded = AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    # A run is refused once the code it began with has changed, and somebody may commit while fifty are killed.
    with mock.patch.object(environment, "git_revision", return_value=None):
        return evaluate(*loaded, make_task("chain_sum", **TASK), SPEC, Path(out), OPTIONS)


def grade_slowly() -> None:
    """Let each grade take a moment, by chance."""
    grade, moments = GradingPool.grade, random.Random()

    def slow(pool: GradingPool, *arguments: str) -> Grade:
        time.sleep(moments.uniform(0, 0.3))
        return grade(pool, *arguments)

    GradingPool.grade = slow


def storm(model: str, root: Path, kills: int, seed: int = 0) -> dict:
    """Run a model's directory once undisturbed, in one process, and once with so many kills; then compare.

    Returns what the kills met: how many ``"before"`` the first sample of a start, ``"between"`` samples and with a
    line ``"half_written"`` (by hand: a kill inside a write is too rare to wait for); and how often a run that had come
    to its end was ``"set_back"``.
    """
    whole = run(model, str(root / "whole"))
    out, moments = root / "killed", random.Random(seed)
    command = [sys.executable, "-m", "tests.support.killed_run", model, str(out)]
    path, env = out / store.SAMPLES, {**os.environ, "PYTHONPATH": str(ROOT)}
    met = dict.fromkeys(("before", "between", "half_written", "set_back"), 0)

    def written() -> int:
        return path.read_bytes().count(b"\n") if path.exists() else 0

    for _ in range(kills):
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        before, deadline = written(), time.monotonic() + 300
        if moments.random() < 0.9:  # else somewhere in the imports
            while process.poll() is None and time.monotonic() < deadline and written() <= before:
                time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
        met["between" if written() > before else "before"] += 1
        if path.exists() and moments.random() < 0.5 and written() < SAMPLES:
            with path.open("ab") as file:
                file.write(b'{"task": "chain_sum", "problem_id": "6-3-')
            met["half_written"] += 1
        if written() == SAMPLES:
            lines = path.read_bytes().splitlines(keepends=True)
            path.write_bytes(b"".join(lines[: moments.randrange(1, SAMPLES // 2)]))
            met["set_back"] += 1
    resumed = run(model, str(out))
    assert compared(resumed) == compared(whole), "the metrics differ"
    assert samples(out) == samples(root / "whole"), "the samples differ"
    return met


def samples(out: Path) -> dict[store.Key, dict]:
    """What a run has of each sample."""
    by_sample = {store.key_of(row): compared(row) for row in store.read_samples(out)}
    assert len(by_sample) == SAMPLES, f"{len(by_sample)} samples of {SAMPLES}"
    return by_sample


def compared(values: dict) -> dict:
    """All but `NOT_COMPARED`."""
    return {name: value for name, value in values.items() if name not in NOT_COMPARED}


if __name__ == "__main__":
    grade_slowly()
    run(*sys.argv[1:])
