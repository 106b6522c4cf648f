"""Compiles every Triton kernel, in every configuration that ships, for every architecture. Needs no GPU.

    python benchmarks/kernel_resources.py            # what changed since the saved table, with the installed Triton
    python benchmarks/kernel_resources.py --again    # everything

The table has rows for several releases: CUDA builds of PyTorch 2.11 include Triton 3.6.0, those of 2.13 include 3.7.1,
and the next may include 3.9.0. To use another release than the installed one, install it with ``pip install --target
DIR --no-deps triton==3.6.0`` and put DIR first in PYTHONPATH.

For each kernel: registers, spills, shared memory, tensor-core instructions, 16-byte loads. Exits with 1 if a kernel
has a fault; the tests apply the same rules to the saved table.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from typing import Any

import triton
from common import CPU, RESULTS, provenance
from kernels.ahead_of_time import Launch, compiled, fingerprint, shipped
from kernels.data_sheets import GPUS, KnownGpu
from kernels.examples import Example
from kernels.machine_code import Resources, faults, resources

TABLE = RESULTS / "kernel_resources.json"
NAMES = [gpu.name for gpu in GPUS]


def saved() -> list[dict[str, Any]]:
    """Rows of the saved table."""
    return json.loads(TABLE.read_text(encoding="utf-8"))["rows"] if TABLE.exists() else []


def saved_resources() -> dict[tuple[str, str], Resources]:
    """(GPU, fingerprint) -> resources, for all kernels that this Triton has compiled before."""
    return {
        (row["gpu"], row["fingerprint"]): Resources(**{field: row[field] for field in Resources._fields})
        for row in saved()
        if row["triton"] == triton.__version__
    }


def write(rows: list[dict[str, Any]]) -> None:
    """Write rows of this Triton to the table, one per line, replacing its earlier rows for the same GPUs."""
    done = {(row["triton"], row["gpu"]) for row in rows}
    rows = rows + [row for row in saved() if (row["triton"], row["gpu"]) not in done]
    rows.sort(key=lambda row: (row["triton"], NAMES.index(row["gpu"])))
    lines = ",\n".join(json.dumps(row) for row in rows)
    note, machine = map(json.dumps, ("compiled ahead of time, not run on a GPU", provenance(CPU)))
    TABLE.write_text(f'{{"note": {note}, "machine": {machine}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")


def row(example: Example, launch: Launch, gpu: KnownGpu, done: dict[tuple[str, str], Resources]) -> dict[str, Any]:
    """The row of one kernel of one example on one GPU."""
    name = launch.kernel.__name__
    used = done.get((gpu.name, fingerprint(launch))) or resources(compiled(launch, gpu), gpu)
    return {
        "triton": triton.__version__,
        "gpu": gpu.name,
        "target": gpu.target,
        "example": example.name,
        "kernel": name,
        "fingerprint": fingerprint(launch),
        "programs": math.prod(launch.grid),
        **launch.options,
        **used._asdict(),
        "faults": faults(used, gpu, **example.required(name)),
    }


def main() -> None:
    """Compile the kernels, and print and save their rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--again", action="store_true", help="compile also what the saved table has already")
    parser.add_argument("--only", default="", help="compile examples whose name contains this, and save nothing")
    options = parser.parse_args()
    bad, count, start = 0, 0, time.perf_counter()
    done = {} if options.again else saved_resources()
    for gpu in (gpu for gpu in GPUS if gpu.name in options.gpus):
        print(f"\n{gpu.name} ({gpu.target}), Triton {triton.__version__}")
        print("regs spill   smem matrix wide/loads ahead waits instr  loop kernel")
        rows = []
        for example, launch in shipped(gpu):
            if options.only not in example.name:
                continue
            entry = row(example, launch, gpu, done)
            rows.append(entry)
            print(
                "{registers:4} {spills:5} {shared:6} {matrix:6} {wide_loads:4}/{loads:<5} {ahead:5} {waits:5} "
                "{instructions:5} {loop:5} ".format(**entry)
                + "{kernel}: {example} ".format(**entry)
                + "; ".join(entry["faults"]),
                flush=True,
            )
        if not options.only:
            write(rows)
        bad += sum(bool(entry["faults"]) for entry in rows)
        count += len(rows)
    print(f"\n{count} kernels, {bad} with faults, {time.perf_counter() - start:.0f} s")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
