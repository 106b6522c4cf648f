"""Analyses the machine code of a kernel, NVIDIA's SASS or AMD's GCN assembly: registers, spills, instructions."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton

from .data_sheets import KnownGpu

SASS_LINE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?(.*)$")
GCN_LINE = re.compile(r"^\t([a-z]\w+(?:\s.*)?)$")
LABEL = re.compile(r"^(\.L\w+):")
JUMP = re.compile(r"(?:BRA\S*|s_c?branch\w*)\s.*?(\.L\w+)")

SPILL = re.compile(r"STL|LDL|scratch_")
MATRIX = re.compile(r"HMMA|HGMMA|UTCHMMA|v_mfma")
LOAD = re.compile(r"(?:LDG|LDGSTS)\b|(?:global|buffer)_load")
WIDE = re.compile(r"(?:LDG|LDGSTS)\.\S*128|(?:global|buffer)_load_(?:dwordx4|b128)")
AHEAD = re.compile(r"LDGSTS|UBLKCP|UTMALDG")
WGMMA = re.compile(r"HGMMA")
ARRIVAL = re.compile(r"WARPGROUP\.ARRIVE")
WAIT = re.compile(r"DEPBAR\.LE SB0, (0x[0-9a-f]+)")


class Resources(NamedTuple):
    """Resources and instructions of one kernel.

    Attributes:
        registers: per thread; on AMD, vector and accumulator registers.
        spills: instructions that spill registers to memory or load them back; on AMD, spilled vector registers.
        stack: bytes of local memory per thread.
        shared: bytes of shared memory per program.
        matrix: tensor-core instructions.
        loads, wide_loads: loads from device memory, and those of 16 bytes per thread.
        ahead: asynchronous loads to shared memory.
        instructions: all instructions.
        loop: instructions of the main loop.
        waits: minimum number of groups of loads still in flight after a wait in the main loop; -1 if it has no such
            wait, as on AMD.
        serialised: warp-group products that wait for each other one by one (ptxas reports C7515).
    """

    registers: int
    spills: int
    stack: int
    shared: int
    matrix: int
    loads: int
    wide_loads: int
    ahead: int
    instructions: int
    loop: int
    waits: int
    serialised: int


def resources(kernel: Any, gpu: KnownGpu) -> Resources:
    """The resources of a kernel that `ahead_of_time.compiled` returns."""
    if gpu.backend == "cuda":
        usage, text = _sass(kernel.asm["cubin"])
        registers = _number(r"REG:(\d+)", usage)
        stack = _number(r"STACK:(\d+)", usage) + _number(r"LOCAL:(\d+)", usage)
        lines, spills = _instructions(text, SASS_LINE), None
    else:
        text = kernel.asm["amdgcn"]
        registers = _number(r"\.vgpr_count:\s+(\d+)", text)
        stack = _number(r"\.private_segment_fixed_size:\s+(\d+)", text)
        lines, spills = _instructions(text, GCN_LINE), _number(r"\.vgpr_spill_count:\s+(\d+)", text)
    code = [line for line in lines if not LABEL.match(line)]
    loop = _main_loop(lines)
    waits = [int(match[1], 16) for line in loop if (match := WAIT.match(line))]

    def count(pattern: re.Pattern[str]) -> int:
        return sum(bool(pattern.match(line)) for line in code)

    return Resources(
        registers,
        count(SPILL) if spills is None else spills,
        stack,
        kernel.metadata.shared,
        count(MATRIX),
        count(LOAD),
        count(WIDE),
        count(AHEAD),
        len(code),
        len(loop),
        min(waits, default=-1),
        count(WGMMA) if 2 < count(WGMMA) <= count(ARRIVAL) else 0,
    )


def _sass(cubin: bytes) -> tuple[str, str]:
    """Output of Triton's copies of NVIDIA's tools: resource usage, and the code with labels."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        return (
            _output(triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", path),
            _output(triton.knobs.nvidia.nvdisasm.path, "-c", path),
        )


def _output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _number(pattern: str, text: str) -> int:
    """The last number that matches: a cubin is described after the code that it is linked with."""
    numbers = re.findall(pattern, text)
    if not numbers:
        raise ValueError(f"the compiler's output has no {pattern}")
    return int(numbers[-1])


def _instructions(text: str, line: re.Pattern[str]) -> list[str]:
    """Labels and instructions, in order."""
    instructions = []
    for raw in text.splitlines():
        if match := LABEL.match(raw) or line.match(raw):
            instructions.append(match[0] if raw.startswith(".") else match[1])
    return instructions


def _main_loop(lines: list[str]) -> list[str]:
    """Instructions of the innermost loop with the most products; the shortest one if there are several.

    A longer loop with as many products is the masked one, which has few iterations. Without products, the longest
    loop. A backward jump from a rarely taken path, placed after all other code, is not a loop: it starts inside a loop
    and ends outside.
    """
    labels = {match[1]: i for i, line in enumerate(lines) if (match := LABEL.match(line))}
    loops = []
    for i, line in enumerate(lines):
        start = labels.get(jump[1], i) if (jump := JUMP.match(line)) else i
        if start < i - 1:  # every kernel ends with a jump to itself
            loops.append((start, i))
    proper = [(a, b) for a, b in loops if not any(c < a < d < b for c, d in loops)]
    innermost = [(a, b) for a, b in proper if not any(a < c and d < b for c, d in proper)]
    bodies = [[line for line in lines[a : b + 1] if not LABEL.match(line)] for a, b in innermost]
    products = [sum(bool(MATRIX.match(line)) for line in body) for body in bodies]
    most = max(products, default=0)
    if not most:
        return max(bodies, key=len, default=[])
    return min((body for body, count in zip(bodies, products, strict=True) if count == most), key=len)


def faults(used: Resources, gpu: KnownGpu, *, products: bool, wide: bool, ahead: bool) -> list[str]:
    """Faults of a kernel that the interpreter does not show and that slow it down on a GPU.

    Args:
        used: the kernel's resources.
        gpu: the target.
        products: it must use tensor cores.
        wide: it must load 16 bytes at a time.
        ahead: its main loop must load ahead while it multiplies. (Visible only in NVIDIA's code.)
    """
    problems = []
    if used.spills or used.stack:
        problems.append(f"{used.spills} spills, {used.stack} bytes of local memory")
    if used.shared > gpu.shared_memory:
        problems.append(f"{used.shared} bytes of shared memory; {gpu.name} has {gpu.shared_memory}")
    if products and not used.matrix:
        problems.append("no instruction for tensor cores")
    if wide and not used.wide_loads:
        problems.append("no 16-byte loads")
    if used.ahead and used.waits == 0:
        problems.append("the main loop waits for all loads, also those of its next turn")
    if ahead and gpu.backend == "cuda" and used.waits < 0:
        problems.append("the main loop has products and loads nothing ahead of them")
    if used.serialised:
        problems.append(f"{used.serialised} products of warp groups wait for each other")
    return problems
