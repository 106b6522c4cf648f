"""Choice of the backend that runs an op.

``reference`` is the definition, ``torch`` is fast on CPUs and runs on any device, ``triton`` is for NVIDIA and AMD
GPUs. The environment variable ``SEERGATE_BACKEND`` forces one. Without it, CUDA tensors use ``triton`` if it is
installed and an NVIDIA GPU is an A100 or newer; all other tensors use ``torch``.

A public op checks its arguments and passes them to the backend by keyword, some of them grouped in a named tuple such
as `seergate.ops.attention.Pack`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

BACKENDS = ("reference", "torch", "triton")
ENV_VAR = "SEERGATE_BACKEND"

FILES = {
    "attention_with_block_targets": "teacher",
    "dense_decode": "decode",
    "gate_kl": "gate_kl",
    "packed_attention": "packed_attention",
    "pool_keys": "compression",
    "retained_attention": "retained_attention",
    "retention_kl": "retention_kl",
    "score_blocks": "selection",
    "scorer_kl": "scorer_kl",
    "select_blocks": "selection",
    "sparse_decode": "decode",
    "update_compressed_keys": "compression",
}
"""Op -> its module in each backend's package."""
WITHOUT_KERNEL = ("pool_keys", "retained_attention", "retention_kl", "scorer_kl")
"""Ops without a Triton kernel, which run in torch on GPUs too."""


@cache
def has_triton() -> bool:
    """True if Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def choose(device: torch.device) -> str:
    """The backend that runs ops on tensors of ``device``.

    Raises:
        ValueError: if ``SEERGATE_BACKEND`` is an unknown backend, or one that cannot run on ``device``.
    """
    forced = os.environ.get(ENV_VAR)
    if not forced:
        return "triton" if device.type == "cuda" and has_triton() and _new_enough(device) else "torch"
    if forced not in BACKENDS:
        raise ValueError(f"{ENV_VAR} is {forced!r}; it must be one of {', '.join(BACKENDS)}, or unset")
    if forced == "triton" and not has_triton():
        raise ValueError(
            f"{ENV_VAR} is 'triton', which is not installed here; it must be reference or torch, or unset"
        )
    if forced == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"{ENV_VAR} is 'triton' and a tensor is on {device}; it must be on a GPU (or set TRITON_INTERPRET=1)"
        )
    return forced


@cache
def _new_enough(device: torch.device) -> bool:
    """True if the GPU has enough shared memory: on NVIDIA, compute capability 8.0 or newer."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(device)[0] >= 8


def run(op: str, device: torch.device, **arguments: Any) -> Any:
    """Compute ``op`` from its checked arguments, on tensors of ``device``.

    Autocast is off, since it would round only some products of an op: ops choose their precision themselves.
    """
    preferred, *fallback = _loaded(op, device)
    on_gpu = device.type == "cuda"
    cast = (on_gpu or device.type == "cpu") and torch.is_autocast_enabled(device.type)
    if not on_gpu and not cast and ".torch_impl." in preferred:
        return getattr(sys.modules[preferred], op)(**arguments)
    # Triton launches on the current device, not on the device of its arguments.
    there = torch.cuda.device(device) if on_gpu else nullcontext()
    exactly = torch.autocast(device.type, enabled=False) if cast else nullcontext()
    accepted = _spread(arguments) if preferred == f"{__package__}.reference" else arguments
    with there, exactly:
        result = getattr(sys.modules[preferred], op)(**accepted)
        return getattr(sys.modules[fallback[0]], op)(**arguments) if result is NotImplemented else result


def _spread(arguments: dict[str, Any]) -> dict[str, Any]:
    """Replace named tuples by their fields, and ``rows``, a `RowLengths`, by the tensor ``lengths``: the reference has
    the signatures of the public ops.
    """
    flat: dict[str, Any] = {}
    for name, value in arguments.items():
        if name == "rows":
            flat["lengths"] = None if value is None else value.tensor
        else:
            flat |= value._asdict() if hasattr(value, "_asdict") else {name: value}
    return flat


def _loaded(op: str, device: torch.device) -> tuple[str, ...]:
    """Import the modules that compute ``op``; returns their names, the preferred one first, then its fallback."""
    return _modules(op, choose(device))


def load(device: torch.device) -> None:
    """Import the implementations of all ops on a device: a compiler that traces a call cannot import."""
    for op in FILES:
        _loaded(op, device)


# A compiled graph keeps the backend of its tracing. `torch.compiler.assume_constant_result` sets the same attribute,
# but imports the compiler, and Triton with it.
_loaded._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _modules(op: str, backend: str) -> tuple[str, ...]:
    names = ["reference"] if backend == "reference" else [f"torch_impl.{FILES[op]}"]
    if backend == "triton" and op not in WITHOUT_KERNEL:
        names.insert(0, f"triton_impl.{FILES[op]}")
    return tuple(importlib.import_module(f"{__package__}.{name}").__name__ for name in names)
