"""Choice of the backend that runs an op.

``reference`` is the definition, ``torch`` is fast on CPUs and runs on any device, ``triton`` is for NVIDIA and AMD
GPUs. Without ``SEERGATE_BACKEND`` in the environment, CUDA tensors go to ``triton`` where it is installed and the
GPU is an A100 or newer, all others to ``torch``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

BACKENDS = ("reference", "torch", "triton")
ENV_VAR = "SEERGATE_BACKEND"

FILES = {
    "attention_with_block_targets": "teacher",
    "dense_decode": "dense_decode",
    "gate_kl": "gate_kl",
    "packed_attention": "packed_attention",
    "pool_keys": "pooling",
    "retained_attention": "retained_attention",
    "retention_kl": "retention_kl",
    "score_blocks": "scoring",
    "scorer_kl": "scorer_kl",
    "select_blocks": "selection",
    "sparse_decode": "sparse_decode",
    "update_compressed_keys": "compression",
}
"""Op name -> the file that holds it, in each backend's package."""
WITHOUT_KERNEL = ("retained_attention", "retention_kl", "scorer_kl")
"""Ops that run in torch on GPUs as well."""


def forced_backend() -> str | None:
    """The backend that the environment asks for, or ``None``."""
    name = os.environ.get(ENV_VAR) or None
    if name is not None and name not in BACKENDS:
        raise ValueError(f"{ENV_VAR} is {name!r}; it must be one of {', '.join(BACKENDS)}, or unset")
    return name


@cache
def has_triton() -> bool:
    """True if Triton can be imported here."""
    return importlib.util.find_spec("triton") is not None


def choose(device: torch.device) -> str:
    """The backend that runs ops on tensors of ``device``.

    Raises:
        ValueError: if the environment forces an unknown backend, or one that cannot run here.
    """
    forced = forced_backend()
    if forced is not None:
        if forced == "triton" and not has_triton():
            raise ValueError(
                f"{ENV_VAR} is 'triton', which is not installed here; it must be reference or torch, or unset"
            )
        if forced == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                f"{ENV_VAR} is 'triton' and a tensor is on {device}; it must be on a GPU (or set TRITON_INTERPRET=1)"
            )
        return forced
    return "triton" if device.type == "cuda" and has_triton() and _new_enough(device) else "torch"


@cache
def _new_enough(device: torch.device) -> bool:
    """True if the kernels' tiles fit: NVIDIA GPUs before compute capability 8.0 have too little shared memory."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(device)[0] >= 8


def implementation(op: str, device: torch.device) -> Callable[..., Any]:
    """The function that computes ``op`` for tensors of ``device``. Its arguments have been checked already."""
    run = getattr(sys.modules[_loaded(op, device)], op)
    if device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type):
        run = _as_given(run, device.type)
    if device.type != "cuda":
        return run

    def there(*args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device(device):  # Triton launches on the current device, not on that of its arguments
            return run(*args, **kwargs)

    return there


def _as_given(run: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """Without autocast, which would round some of an op's products and not others: ops choose their own precision."""

    def exactly(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(kind, enabled=False):
            return run(*args, **kwargs)

    return exactly


def _loaded(op: str, device: torch.device) -> str:
    """Name of the module that holds the implementation, which is imported. (A compiler can follow no import.)"""
    return importlib.import_module(_module(choose(device), op)).__name__


# A graph keeps the backend that it was traced with. This is what `torch.compiler.assume_constant_result` does, which
# would import the compiler, and Triton with it.
_loaded._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _module(backend: str, op: str) -> str:
    if backend == "reference":
        return f"{__package__}.reference"
    return f"{__package__}.{'torch' if op in WITHOUT_KERNEL else backend}_impl.{FILES[op]}"
