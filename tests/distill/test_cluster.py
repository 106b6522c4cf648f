"""The files for several machines: what reads them reads them here, and every option they name exists."""

import re
from pathlib import Path

import pytest

CLUSTER = Path(__file__).resolve().parents[2] / "train/cluster"


def test_options_of_torchrun_in_the_slurm_script():
    from torch.distributed.run import get_args_parser

    text = (CLUSTER / "slurm.sbatch").read_text()
    options = {option for action in get_args_parser()._actions for option in action.option_strings}
    named = re.findall(r"(--[a-z-]+)=", text[text.index("torchrun \\") :])
    assert len(named) == 5 and set(named) <= options


def test_torchrun_kills_no_sooner_than_slurm_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is longer than torchrun's 30 seconds after SIGTERM is finished and saved."""
    from torch.distributed.launcher.api import LaunchConfig

    if not hasattr(LaunchConfig, "shutdown_timeout"):
        pytest.skip("torchrun of this PyTorch always waits 30 seconds")
    text = (CLUSTER / "slurm.sbatch").read_text()
    for name, value in re.findall(r"^export (TORCH_\w+)=(\d+)", text, re.MULTILINE):
        monkeypatch.setenv(name, value)
    [seconds] = re.findall(r"--signal=TERM@(\d+)", text)
    assert LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1).shutdown_timeout == int(seconds)


def test_deepspeed_reads_the_hostfile():
    runner = pytest.importorskip("deepspeed.launcher.runner")
    assert dict(runner.fetch_hostfile(str(CLUSTER / "hostfile"))) == {"node-1": 8, "node-2": 8}


def test_accelerate_reads_its_file():
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    config = load_config_from_file(str(CLUSTER / "accelerate.yaml"))
    assert (config.num_processes, config.num_machines, config.mixed_precision) == (8, 1, "no")
    assert launch_command_parser().parse_args(["--config_file", "accelerate.yaml", "train.py"]).config_file
