"""`train.py` as users start it: under `torchrun` and the `deepspeed` launcher, on in another way, killed."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch

from seergate.distill import TrainConfig, run_distillation
from seergate.distill.callbacks import StepLog
from seergate.distill.checkpoint import newest_checkpoint
from seergate.distill.distributed import STEP_HOURS
from tests.distill.conftest import Recorder, assert_identical, assert_same, scalars, state, weights
from tests.support.evaluation import mostly_soak
from tests.support.pairs import free_port
from tests.support.running import ROOT

SCRIPTS = Path(sys.executable).parent
STEPS = 5

pytestmark = [pytest.mark.timeout(900)]  # processes that import everything, several at once


def start(launcher: str, config: TrainConfig) -> subprocess.Popen[str]:
    """Start two processes of a run on this machine."""
    file = config.run_dir.with_suffix(".yaml")
    config.save(file)
    command = [*launch(launcher), str(ROOT / "train.py"), "--model", config.model, "--config", str(file)]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def finish(launcher: str, config: TrainConfig) -> str:
    process = start(launcher, config)
    output, _ = process.communicate(timeout=800)
    assert process.returncode == 0, output
    return output


def launch(launcher: str) -> list[str]:
    options = {
        "torchrun": ["--nproc-per-node", "2", "--master-port"],
        "deepspeed": ["--num_gpus", "2", "--master_port"],
        "accelerate": [
            "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no",
            "--dynamo_backend", "no", "--main_process_port",
        ],
    }  # fmt: skip
    return [str(SCRIPTS / launcher), *options[launcher], str(free_port())]


def agree(run: Path, other: Path) -> None:
    """Gates, optimizer and losses are the same but for the order of sums."""
    for tensors in (weights, state):
        torch.testing.assert_close(tensors(run), tensors(other), rtol=0, atol=1e-6)
    losses, others = scalars(run), scalars(other)
    assert len(losses) == len(others) == STEPS and dict(losses) == pytest.approx(dict(others), abs=1e-6)


@pytest.fixture
def alone(config: TrainConfig, tmp_path: Path) -> tuple[TrainConfig, Path]:
    """A run in one process, undisturbed. Two cannot share its three packs a step evenly; each pack has other rows."""
    config = replace(config, row_stride=4, packs_per_step=3, max_steps=STEPS, save_steps=2, save_total_limit=3)
    return config, run_distillation(replace(config, output_dir=str(tmp_path / "alone")))


def copied_back(run: Path, name: str) -> Path:
    """A copy of a run as it was after its second step."""
    copy = run.parent / name
    shutil.copytree(run, copy)
    for path in sorted((copy / "checkpoints").iterdir())[1:]:
        shutil.rmtree(path)
    assert newest_checkpoint(copy / "checkpoints").name == "step-00000002"
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("launcher", mostly_soak(("torchrun", "deepspeed", "accelerate"), "torchrun"))
def test_two_processes_agree_with_one_and_go_on_in_one(alone: tuple[TrainConfig, Path], launcher: str) -> None:
    options, run = alone
    both = run.parent / "both"
    if launcher == "deepspeed":
        file = run.parent / "deepspeed.json"
        file.write_text(json.dumps({"zero_optimization": {"stage": 2, "round_robin_gradients": True}}))
        options = replace(options, deepspeed=str(file))
    output = finish(launcher, replace(options, output_dir=str(both)))
    assert "in 2 processes" in output and ("DeepSpeed ZeRO" in output) == (launcher == "deepspeed")
    assert output.count("the gates are in ") == output.count("3 packs a step: one less for 1 of 2 processes") == 1
    agree(both, run)
    agree(run_distillation(replace(options, output_dir=str(copied_back(both, "one")))), run)


@pytest.mark.soak
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_two_processes_resume_exactly(alone: tuple[TrainConfig, Path], launcher: str) -> None:
    options, run = alone
    both = run.parent / "both"
    finish(launcher, replace(options, output_dir=str(both)))
    again = copied_back(both, "again")
    output = finish(launcher, replace(options, output_dir=str(again)))
    assert f"continuing after step 2 of {STEPS}" in output
    assert_identical(state(again), state(both))
    two = copied_back(run, "two")  # of one process, in two
    finish(launcher, replace(options, output_dir=str(two)))
    agree(two, run)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed in this process, which leaves nothing behind, and without its own all-reduce for the processes of one
    machine, which takes two minutes to compile (`make soak` has it).
    """
    deepspeed = pytest.importorskip("deepspeed")
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**variables, "MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu"}.items():
        monkeypatch.setenv(name, value)


def test_a_run_goes_on_with_deepspeed_and_without_it(alone: tuple[TrainConfig, Path], environment: None) -> None:
    """With the optimizer in host memory; `test_two_processes_agree_with_one` has the other file."""
    options, run = alone
    offload = str(ROOT / "ds_configs/zero2-offload.json")
    waits: list[timedelta] = []

    class Clock(Recorder):
        def on_step(self, log: StepLog) -> None:
            gloo = torch.distributed.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
            waits.append(gloo.options._timeout)

    zero_options = replace(options, output_dir=str(copied_back(run, "zero")), deepspeed=offload)
    zero = run_distillation(zero_options, [Clock()])
    assert set(waits) == {timedelta(hours=STEP_HOURS)}  # a process that hangs ends the run in minutes
    agree(zero, run)
    agree(run_distillation(replace(options, output_dir=str(copied_back(zero, "plain")))), run)


def steps_of(process: subprocess.Popen[str], count: int) -> list[int]:
    """The next steps that a run reports; it still runs then."""
    assert process.stdout is not None
    numbers = (int(line.split()[1].split("/")[0]) for line in process.stdout if line.startswith("step "))
    steps = list(itertools.islice(numbers, count))
    assert len(steps) == count, "it ended before it could be killed"
    return steps


@pytest.mark.soak
def test_with_one_of_two_deepspeed_processes_killed_it_ends_bit_identical(config: TrainConfig, tmp_path: Path) -> None:
    config = replace(config, max_steps=40, save_steps=3, eval_steps=4, logging_steps=1)  # its end is far
    whole = replace(config, output_dir=str(tmp_path / "whole"))
    finish("deepspeed", whole)
    process = start("deepspeed", config)
    assert steps_of(process, 1) == [1]
    processes = psutil.Process(process.pid).children(recursive=True)
    (second,) = (each for each in processes if "--local_rank=1" in each.cmdline())
    assert steps_of(process, 7) == list(range(2, 9))
    second.kill()  # SIGKILL; the other one finds the connection gone, and the launcher ends it
    process.communicate(timeout=300)
    assert process.returncode != 0
    assert not psutil.wait_procs(processes, timeout=60)[1]
    reached = int(newest_checkpoint(config.run_dir / "checkpoints").name.removeprefix("step-"))
    assert reached % 3 == 0 and 6 <= reached < 40
    assert f"continuing after step {reached} of 40" in finish("deepspeed", config)
    assert_same(config.run_dir, whole.run_dir)
