"""Kills a training run at random points, starts it again, and compares what comes out with an undisturbed run.

    python -m tests.support.kills --kills 100 --record benchmarks/results/kills.json

The run is a forked process, so that starting it again costs nothing but its own work, and it dies by SIGKILL: in the
middle of a pack, the optimizer's update, an evaluation, the export of an adapter, the saving of a checkpoint, or the
preparation of the data.
"""

import argparse
import collections
import contextlib
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets  # noqa: F401 (loaded before the forks, as everything else)
import torch
import torch.utils.tensorboard
from safetensors.torch import load_file

from benchmarks.common import save
from seergate.distill import TrainConfig, engines, load_train_config, run_distillation, training_run
from tests.distill.conftest import assert_identical, scalars, state

PHASES = ("data", "step", "update", "evaluation", "export", "save")


class Board:
    """How often each phase has begun, and how many seconds it has taken: memory that parent and child share."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 16 * len(PHASES))

    def clear(self) -> None:
        self._memory[:] = bytes(len(self._memory))

    def read(self, phase: str) -> tuple[int, float]:
        return struct.unpack_from("qd", self._memory, 16 * PHASES.index(phase))

    def watched(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, telling the board when it begins and how long it took."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            (count, seconds), place = self.read(phase), 16 * PHASES.index(phase)
            struct.pack_into("qd", self._memory, place, count + 1, seconds)
            started = time.perf_counter()
            result = function(*args, **kwargs)
            struct.pack_into("qd", self._memory, place, count + 1, seconds + time.perf_counter() - started)
            return result

        return wrapper


def start(config: TrainConfig, board: Board) -> int:
    """Fork a process that trains; returns its number."""
    board.clear()
    process = os.fork()
    if process:
        return process
    try:
        with open(os.devnull, "w") as no, contextlib.redirect_stdout(no), contextlib.redirect_stderr(no):
            training_run.token_files = board.watched("data", training_run.token_files)
            engines.PlainEngine.accumulate = board.watched("step", engines.PlainEngine.accumulate)
            engines.PlainEngine.update = board.watched("update", engines.PlainEngine.update)
            training_run.Run.evaluated = board.watched("evaluation", training_run.Run.evaluated)
            training_run.save_adapter = board.watched("export", training_run.save_adapter)
            training_run.save_checkpoint = board.watched("save", training_run.save_checkpoint)
            run_distillation(config)
        os._exit(0)
    except BaseException as error:
        print(f"the run failed: {type(error).__name__}: {error}", file=sys.__stderr__, flush=True)
        os._exit(1)


def finish(process: int) -> None:
    """Wait for a run to end well."""
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the run failed"


def kill_once(config: TrainConfig, board: Board, phase: str, occurrence: int, delay: float) -> None:
    """Start the run and kill it ``delay`` seconds into the n-th occurrence of a phase."""
    process = start(config, board)
    until = time.monotonic() + 300
    while board.read(phase)[0] < occurrence:
        gone, status = os.waitpid(process, os.WNOHANG)
        assert not gone, f"it ended ({os.waitstatus_to_exitcode(status)}) before its {phase} could be interrupted"
        assert time.monotonic() < until, f"no {phase} in five minutes"
        time.sleep(1e-4)
    time.sleep(delay)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def storm(config: TrainConfig, kills: int, seed: int = 0) -> collections.Counter[str]:
    """`both`, then `compare`; returns how many kills fell into each phase."""
    killed, whole, fell = both(config, kills, seed)
    compare(killed, whole)
    return fell


def both(config: TrainConfig, kills: int, seed: int) -> tuple[TrainConfig, TrainConfig, collections.Counter[str]]:
    """A killed run and an undisturbed one, which have ended, and how many kills fell into each phase.

    Steps, evaluations and checkpoints of the small run ``config`` are set so that no kill comes after its end.
    """
    config = replace(config, max_steps=2 * kills + 6, save_steps=1, eval_steps=1, save_total_limit=2)
    root, board, rng = config.run_dir, Board(), random.Random(seed)
    whole = replace(config, output_dir=str(root / "whole"), token_cache=str(root / "whole-cache"))
    finish(start(whole, board))
    seconds = {phase: total / count for phase, (count, total) in ((p, board.read(p)) for p in PHASES)}
    killed = replace(config, output_dir=str(root / "killed"), token_cache=str(root / "killed-cache"))
    fell: collections.Counter[str] = collections.Counter()
    for _ in range(kills):
        phase = rng.choice(PHASES)
        if phase == "data":  # there is something to interrupt only without tokens
            shutil.rmtree(str(killed.token_cache), ignore_errors=True)
        occurrence = rng.randint(1, 2) if phase in ("evaluation", "save") else 1
        kill_once(killed, board, phase, occurrence, rng.uniform(0, seconds[phase]))
        fell[phase] += 1
    finish(start(killed, board))
    return killed, whole, fell


def compare(killed_run: TrainConfig, whole_run: TrainConfig) -> None:
    """Gates, best gates, optimizer and curves are the same to the last bit, and nothing half-done is left."""
    killed, whole = killed_run.run_dir, whole_run.run_dir
    for name in ("gate_model.safetensors", "best/gate_model.safetensors"):
        assert_identical(load_file(killed / name), load_file(whole / name))
    assert_identical(*(state(run) for run in (killed, whole)))
    # What a killed export leaves is removed by a later one, once it is an hour old and no live writer's.
    left = [
        p.name for p in killed.rglob(".*") if not p.name.startswith((".saving-", ".lock")) and p.parent.name[0] != "."
    ]
    assert not left, left
    assert scalars(killed) == scalars(whole), "the curves differ"


def main() -> None:
    """Parse the command line and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, metavar="FILE", help="write what came out as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        small = {"data_limit": 40, "chain_sum_variables": (12, 18), "max_length": 512, "eval_packs": 2}
        config = load_train_config("tiny-reasoner", {**small, "output_dir": scratch, "packs_per_step": 1})
        started = time.monotonic()
        killed, whole, fell = both(config, options.kills, options.seed)
        seconds, differs = time.monotonic() - started, ""
        try:
            compare(killed, whole)
        except AssertionError as error:
            differs = str(error) or "it differs"
    if options.record:
        row = {"engine": "plain", "processes": 1, "kills": fell.total(), "by_phase": {p: fell[p] for p in PHASES}}
        row |= {"steps": killed.max_steps, "seconds": round(seconds), "identical": not differs}
        described = {"kills": options.kills, "seed": options.seed}
        save(options.record.stem, described, [row], options.record.parent)
    places = ", ".join(f"{phase} {fell[phase]}" for phase in PHASES)
    print(f"{options.kills} kills ({places}), {differs or 'final gates bit-identical'}, {seconds:.0f} s")
    sys.exit(bool(differs))


if __name__ == "__main__":
    main()
