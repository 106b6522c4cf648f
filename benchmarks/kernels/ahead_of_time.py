"""Compiles the kernels that the ops launch, for GPUs that need not be present.

The calls are those of `examples`. Their launches are intercepted where Triton would start them, and their arguments
are specialised as Triton does for a launch, so the compiled kernels are those that would run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from seergate.ops.triton_impl.gpus import Gpu, assuming

from .examples import Example, examples


class Launch(NamedTuple):
    """A kernel, its grid of programs, its arguments by name, and options such as ``num_warps``."""

    kernel: JITFunction
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]


def shipped(gpu: Gpu) -> Iterator[tuple[Example, Launch]]:
    """Every configuration of every kernel that the examples launch on ``gpu``, each once."""
    seen = set()
    with assuming(gpu):
        known = list(examples())
    for example in known:
        for launch in launches(example.call, gpu):
            if (key := specialisation(launch)) not in seen:
                seen.add(key)
                yield example, launch


def launches(call: Callable[[], Any], gpu: Gpu) -> list[Launch]:
    """The launches of a call on meta tensors on ``gpu``; no kernel runs."""
    with assuming(gpu), _intercepted() as seen:
        call()
    return seen


@contextmanager
def _intercepted() -> Iterator[list[Launch]]:
    seen: list[Launch] = []

    def record(kernel: JITFunction, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        arguments = dict(zip(kernel.arg_names, args, strict=False))
        arguments |= {name: value for name, value in kwargs.items() if name in kernel.arg_names}
        missing = set(kernel.arg_names) - set(arguments)
        if missing:
            raise TypeError(f"{kernel.__name__} was launched without {', '.join(sorted(missing))}")
        options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
        seen.append(Launch(kernel, grid, arguments, options))

    run = JITFunction.run
    JITFunction.run = record
    try:
        yield seen
    finally:
        JITFunction.run = run


def compiled(launch: Launch, gpu: Gpu) -> Any:
    """Triton's compiled kernel; its ``asm`` holds the machine code, its ``metadata`` the shared memory."""
    target = GPUTarget(gpu.backend, gpu.arch, gpu.warp_size)
    return triton.compile(_source(launch), target, launch.options)


def fingerprint(launch: Launch) -> str:
    """Hash of everything that the machine code depends on, except for Triton and the GPU."""
    source = _source(launch)
    parts = (_text(launch.kernel), source.signature, source.constants, source.attrs, sorted(launch.options.items()))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _text(kernel: JITFunction) -> str:
    """The source of a kernel and of what it calls. (Triton's own hash also has line numbers, which change nothing.)"""
    text = kernel.src
    for name in sorted(kernel.fn.__code__.co_names):
        value = kernel.fn.__globals__.get(name)
        if isinstance(value, JITFunction):
            text += _text(value)
        elif isinstance(value, tl.constexpr):
            text += f"{name}={value.value}"
    return text


def specialisation(launch: Launch) -> tuple[Any, ...]:
    """Triton's specialisation key of a launch: launches with the same key share a compiled kernel."""
    key: list[Any] = [launch.kernel.__name__, *sorted(launch.options.items())]
    for parameter in launch.kernel.params:
        value = launch.arguments[parameter.name]
        if parameter.do_not_specialize and isinstance(value, int):
            key.append(_specialised(value + (value == 1), False)[0])  # only its type: 1 is no constant here
            continue
        kind, divisible = _specialised(value, parameter.is_constexpr)
        if kind == "constexpr":
            key.append((kind, str(value)))
        else:
            key.append((kind, divisible and not parameter.do_not_specialize_on_alignment))
    return tuple(key)


def _source(launch: Launch) -> ASTSource:
    """A kernel with all arguments specialised as in the example, also those that a launch does not specialise.

    These are few (numbers of tiles and tokens, the turn, a weight's address), and none is a stride.
    """
    signature, constants, attributes = {}, {}, {}
    for i, (name, parameter) in enumerate(zip(launch.kernel.arg_names, launch.kernel.params, strict=True)):
        value = launch.arguments[name]
        signature[name], divisible = _specialised(value, parameter.is_constexpr)
        signature[name] = parameter.annotation_type or signature[name]
        if signature[name] == "constexpr":
            constants[(i,)] = value
        elif divisible:
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def _specialised(value: Any, is_constexpr: bool) -> tuple[str, bool]:
    """Triton's type of an argument, and whether it is known to be divisible by 16."""
    if is_constexpr or value is None or (isinstance(value, int) and value == 1):
        return "constexpr", False
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        short = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "bool": "i1"}
        offset = value.storage_offset() * value.element_size()
        return "*" + short.get(kind, kind.replace("uint", "u").replace("int", "i")), offset % 16 == 0
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64", value % 16 == 0
    if isinstance(value, float):
        return "fp32", False
    raise TypeError(f"a kernel was launched with a {type(value).__name__}")
