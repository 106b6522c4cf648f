"""Two processes of one run as a launcher would start them, but each in a place of its own choice."""

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """A port that stays free: below those that Linux gives to connections and to servers that do not choose one."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)  # each test seeds `random` alike
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)):
                return port


def pair(
    arguments: Sequence[str], *, places: Any = (ROOT, ROOT), machines: int = 1, env: Any = None, seconds: float = 240
) -> list[subprocess.CompletedProcess[str]]:
    """Run ``python *arguments`` twice, in these working directories; exit code and output of each, by rank.

    With two ``machines`` the processes take themselves for the first of a machine each. Those that run for more than
    so many ``seconds`` are killed.
    """
    common = {
        **{key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"},
        **{"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        **(env or {}),
    }
    ranks = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank if machines == 1 else 0)} for rank in (0, 1)]
    piped = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, *arguments]
    processes = [subprocess.Popen(command, cwd=places[i], env=env, **piped) for i, env in enumerate(ranks)]
    end = time.monotonic() + seconds
    try:
        outputs = [_output(process, max(1.0, end - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *output)
        for process, output in zip(processes, outputs, strict=True)
    ]


def _output(process: subprocess.Popen[str], seconds: float) -> tuple[str, str]:
    try:
        return process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()
