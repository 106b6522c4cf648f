"""What every benchmark shares: timing, and a record of where a number comes from."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def timed(run: Callable[[], Any], repeats: int, device: torch.device) -> dict[str, float]:
    """Milliseconds per call, after one that is not counted: ``{"min": ..., "median": ...}``."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    run()
    wait()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        wait()
        times.append((time.perf_counter() - start) * 1e3)
    return {"min": min(times), "median": statistics.median(times)}


def provenance(device: torch.device) -> dict[str, str | int]:
    """Machine, versions and commit."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": git.stdout.strip() or "unknown",
    }


def save(name: str, device: torch.device, options: dict[str, Any], rows: list[dict[str, Any]]) -> Path:
    """Write ``benchmarks/results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {"machine": provenance(device), "options": options, "rows": rows}
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path
