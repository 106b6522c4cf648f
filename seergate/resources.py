"""The cores and the memory that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
"""Directory of the container's limits (version 2 of control groups)."""


def available_cores() -> int:
    """Number of cores that this process may use, which a scheduler such as Slurm may limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def container_limit() -> int | None:
    """Maximum bytes of memory of this container; ``None`` if it has no limit, or this is no container of Linux."""
    try:
        limit = (CGROUP / "memory.max").read_text("utf-8").strip()
    except OSError:
        return None
    return None if limit == "max" else int(limit)


def free_memory() -> int:
    """Bytes of memory that are free now, within the limits of a container."""
    free = int(psutil.virtual_memory().available)
    if (limit := container_limit()) is None:
        return free
    try:
        used, counts = ((CGROUP / f"memory.{name}").read_text("utf-8") for name in ("current", "stat"))
    except OSError:
        return free
    # pages of files that were read, such as weights, count as used, although the kernel frees them on demand
    file_pages = dict(line.split() for line in counts.splitlines()).get("inactive_file", 0)
    return min(free, limit - int(used) + int(file_pages))
