"""`train.py` as users start it: alone, under `torchrun`, under the DeepSpeed launcher, and killed without warning."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from seergate.distill import TrainConfig, run_distillation
from seergate.distill.checkpoint import newest_checkpoint
from tests.distill.test_trainer import assert_identical, config, model_dir, weights  # noqa: F401 (fixtures)

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sys.executable).parent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # processes that import everything, several at once


def arguments(config: TrainConfig, tmp_path: Path) -> list[str]:  # noqa: F811
    file = tmp_path / f"{config.run_dir.name}.yaml"
    config.save(file)
    return [str(ROOT / "train.py"), "--model", config.model, "--config", str(file)]


def start(command: list[str]) -> subprocess.Popen[str]:
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def finish(command: list[str]) -> str:
    process = start(command)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return output


def free_port() -> str:
    return str(random.SystemRandom().randint(20000, 60000))


def state(run: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(Path(str(newest_checkpoint(run / "checkpoints"))) / "state.safetensors")
    return {name: x for name, x in tensors.items() if not name.startswith("random")}


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name] - b[name]).abs().max() <= tolerance, name


def launch(launcher: str) -> list[str]:
    """The beginning of a command that starts two processes on this machine."""
    options = {
        "torchrun": ["--nproc-per-node", "2", "--master-port"],
        "deepspeed": ["--num_gpus", "2", "--master_port"],
        "accelerate": [
            "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no",
            "--dynamo_backend", "no", "--main_process_port",
        ],
    }  # fmt: skip
    return [str(SCRIPTS / launcher), *options[launcher], free_port()]


def losses(run: Path) -> list[float]:
    """The loss curve, from TensorBoard's file."""
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [event.value for event in events.Scalars("loss")]


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "accelerate"])
def test_two_processes_agree_with_one_and_resume_exactly(config: TrainConfig, tmp_path: Path, launcher: str) -> None:  # noqa: F811
    config = replace(config, packs_per_step=4, steps=9, save_every=6)
    alone = run_distillation(replace(config, output_dir=str(tmp_path / "alone")))
    both = replace(config, output_dir=str(tmp_path / "both"))
    command = [*launch(launcher), *arguments(both, tmp_path)]
    output = finish(command)
    assert "in 2 processes" in output and ("DeepSpeed ZeRO" in output) == (launcher == "deepspeed")
    assert output.count("adapter: ") == 1  # one process talks
    assert_close(weights(both.run_dir), weights(alone), 1e-6)
    assert_close(state(both.run_dir), state(alone), 1e-6)
    assert len(losses(alone)) == 9 and losses(both.run_dir) == pytest.approx(losses(alone), abs=1e-6)

    if launcher == "accelerate":
        return  # its processes are torchrun's, which go on below
    before = state(both.run_dir)
    newest = newest_checkpoint(both.run_dir / "checkpoints")
    assert newest is not None and newest.name == "step-00000009"
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    assert "continuing after step 6 of 9" in finish(command)
    assert_identical(state(both.run_dir), before)


def back_to(run: Path, step: int) -> None:
    """As if the run had been interrupted after the checkpoint of this step."""
    checkpoints = run / "checkpoints"
    for path in checkpoints.iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    assert newest_checkpoint(checkpoints) == checkpoints / f"step-{step:08d}"


def branch(config: TrainConfig, run: Path, name: str, step: int, *command: str) -> Path:  # noqa: F811
    """A copy of the run that goes on from ``step`` in another way, and must end where ``run`` has ended."""
    copy = run.parent / name
    shutil.copytree(run, copy)
    back_to(copy, step)
    zero = ["--deepspeed"] if name.startswith("one-zero") else []
    zero += ["ds_configs/zero2-offload.json"] if "offload" in name else []
    output = finish([*command, *arguments(replace(config, output_dir=str(copy)), run.parent), *zero])
    assert f"continuing after step {step} of 9" in output and ("DeepSpeed ZeRO" in output) == ("zero" in name)
    assert ("in 2 processes" in output) == ("two" in name)
    assert_close(state(copy), state(run), 1e-6)
    assert_close(weights(copy), weights(run), 1e-6)
    assert losses(copy) == pytest.approx(losses(run), abs=1e-6)
    return copy


@pytest.fixture
def alone(config: TrainConfig, tmp_path: Path) -> tuple[TrainConfig, Path]:  # noqa: F811
    """A run of nine steps in one process that nothing has disturbed."""
    config = replace(config, packs_per_step=4, steps=9, save_every=3, save_total_limit=3)
    return config, run_distillation(replace(config, output_dir=str(tmp_path / "alone")))


def test_a_run_of_one_process_goes_on_in_two_and_then_in_one(alone: tuple[TrainConfig, Path]) -> None:
    options, run = alone
    two = branch(options, run, "two", 3, *launch("torchrun"))
    branch(options, two, "one", 6, sys.executable)


def test_a_run_goes_on_with_deepspeed_with_fewer_processes_and_without_it(alone: tuple[TrainConfig, Path]) -> None:
    options, run = alone
    two = branch(options, run, "two-zero", 3, *launch("deepspeed"))
    branch(options, two, "one-zero", 6, sys.executable)
    branch(options, two, "one", 6, sys.executable)


def test_a_run_goes_on_with_the_optimizer_of_deepspeed_in_host_memory(alone: tuple[TrainConfig, Path]) -> None:
    options, run = alone
    offloaded = branch(options, run, "one-zero-offload", 3, sys.executable)
    branch(options, offloaded, "one-zero", 6, sys.executable)


def test_a_batch_that_cannot_be_shared_is_refused(config: TrainConfig, tmp_path: Path) -> None:  # noqa: F811
    process = start([*launch("torchrun"), *arguments(replace(config, packs_per_step=3), tmp_path)])
    output, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert output.count("error: packs_per_step is 3; it must be a multiple of the 2 processes") == 1


def test_killed_at_random_moments_it_ends_bit_identical(config: TrainConfig, tmp_path: Path) -> None:  # noqa: F811
    # A step, a checkpoint and every other time an evaluation with an export take milliseconds each, so that a random
    # moment may fall into any of them.
    config = replace(config, steps=60, save_every=1, eval_every=2, log_every=1)
    command = [sys.executable, *arguments(config, tmp_path)]
    whole = run_distillation(replace(config, output_dir=str(tmp_path / "whole")))
    rng = random.Random(0)
    reached = 0
    for _ in range(3):  # `test_kills` does many, aimed at every part of a run; this is the command as users start it
        process = start(command)
        assert process.stdout is not None
        wanted = rng.randint(1, 8)
        for line in process.stdout:
            if line.startswith("step "):
                assert int(line.split()[1].split("/")[0]) >= reached  # it goes on, it does not start over
                wanted -= 1
                if not wanted:
                    break
        else:
            pytest.fail("it ended before it could be killed")
        time.sleep(rng.uniform(0, 0.05))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        newest = newest_checkpoint(config.run_dir / "checkpoints")
        reached = int(newest.name.removeprefix("step-")) if newest else 0
    assert 0 < reached < 60
    finish(command)
    assert_identical(weights(config.run_dir), weights(whole))
    assert_identical(weights(config.run_dir / "best"), weights(whole / "best"))
    assert_identical(state(config.run_dir), state(whole))
    assert not list(config.run_dir.rglob(".draft-*"))


def steps_of(process: subprocess.Popen[str], count: int) -> list[int]:
    """The next steps that a run tells of; it still runs then."""
    assert process.stdout is not None
    told = (int(line.split()[1].split("/")[0]) for line in process.stdout if line.startswith("step "))
    steps = list(itertools.islice(told, count))
    assert len(steps) == count, "it ended before it could be killed"
    return steps


def test_with_one_of_two_deepspeed_processes_killed_it_ends_bit_identical(config: TrainConfig, tmp_path: Path) -> None:  # noqa: F811
    config = replace(config, steps=40, save_every=3, eval_every=4, log_every=1)  # far from its end when it is killed
    whole = replace(config, output_dir=str(tmp_path / "whole"))
    finish([*launch("deepspeed"), *arguments(whole, tmp_path)])
    process = start([*launch("deepspeed"), *arguments(config, tmp_path)])
    assert steps_of(process, 1) == [1]
    processes = psutil.Process(process.pid).children(recursive=True)
    (second,) = (each for each in processes if "--local_rank=1" in each.cmdline())
    assert steps_of(process, 7) == list(range(2, 9))
    second.kill()  # SIGKILL; the other one finds the connection gone, and the launcher ends it
    process.communicate(timeout=300)
    assert process.returncode != 0
    assert not psutil.wait_procs(processes, timeout=60)[1]
    newest = newest_checkpoint(config.run_dir / "checkpoints")
    assert newest is not None
    reached = int(newest.name.removeprefix("step-"))
    assert reached % 3 == 0 and 6 <= reached < 40
    assert f"continuing after step {reached} of 40" in finish([*launch("deepspeed"), *arguments(config, tmp_path)])
    for part in (".", "best"):
        assert_identical(weights(config.run_dir / part), weights(whole.run_dir / part))
    assert_identical(state(config.run_dir), state(whole.run_dir))


def test_what_is_wrong_with_the_data_is_said_once(config: TrainConfig, tmp_path: Path) -> None:  # noqa: F811
    config = replace(config, data=str(tmp_path / "rows.jsonl"))
    (tmp_path / "rows.jsonl").write_text('{"text": "short"}\n')
    process = start([*launch("torchrun"), *arguments(config, tmp_path)])
    output, _ = process.communicate(timeout=300)
    assert (
        process.returncode != 0 and output.count("has nothing to train on: of 1 rows, 1 that fit in two blocks") == 1
    )
    assert "SeergateError" not in output  # the one that waited leaves without a traceback


def test_killed_while_preparing_data_it_starts_again(config: TrainConfig, tmp_path: Path) -> None:  # noqa: F811
    cache = tmp_path / "cache"
    config = replace(config, token_cache=str(cache), data_limit=5_000, steps=2)
    command = [sys.executable, *arguments(config, tmp_path)]
    process = start(command)
    until = time.monotonic() + 120
    while not any(cache.glob(".*.draft/*")) and time.monotonic() < until:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert [path.name[0] for path in cache.iterdir()] == ["."]  # only a draft
    assert "5,000 rows" in finish(command)
