"""The files for several machines: what reads them reads them here, and every option they name exists."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from seergate.cli.train import main

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "train/cluster"


@pytest.mark.parametrize("command", [["bash", "-n"], ["shellcheck"]])
def test_the_slurm_script_is_a_bash_script(command):
    if not shutil.which(command[0]):
        pytest.skip(f"needs {command[0]}")
    done = subprocess.run([*command, CLUSTER / "slurm.sbatch"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


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


def test_options_of_train_py_in_the_recipes(capsys):
    """Those that follow ``train.py`` on a line of the recipes and of the comments in the cluster's files."""
    texts = [path.read_text() for path in (ROOT / "docs/train.md", *sorted(CLUSTER.iterdir()))]
    lines = [line.split(" train.py --")[1] for text in texts for line in text.splitlines() if " train.py --" in line]
    named = {option for line in lines for option in re.findall(r"--[a-z-]+", f"--{re.split('[#`]', line)[0]}")}
    with pytest.raises(SystemExit):
        main(["--help"])
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert len(named) >= 5 and named <= options


def test_deepspeed_reads_the_hostfile():
    runner = pytest.importorskip("deepspeed.launcher.runner")
    assert dict(runner.fetch_hostfile(str(CLUSTER / "hostfile"))) == {"node-1": 8, "node-2": 8}


def test_accelerate_reads_its_file():
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    config = load_config_from_file(str(CLUSTER / "accelerate.yaml"))
    assert (config.num_processes, config.num_machines, config.mixed_precision) == (8, 1, "no")
    assert (
        launch_command_parser().parse_args(["--config_file", "train/cluster/accelerate.yaml", "train.py"]).config_file
    )
