"""``seergate doctor``: what is installed, what works here, and whether a model can be gated."""

from __future__ import annotations

import argparse
import os
import platform

from seergate.config import GateConfig
from seergate.distill.config import load_train_config
from seergate.models.names import TINY, TINY_GATES, TINY_MODEL, model_path
from seergate.paths import shipped
from seergate.version import __version__

HELP = (
    "what is installed and what works on this machine",
    "Print versions, devices, usable backends and shipped checkpoints; with --model, whether a model can be gated\n"
    "(read from its configuration alone, no weights are loaded).",
    ["seergate doctor", "seergate doctor --model Qwen/Qwen3-8B"],
)

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "triton",
    "deepspeed",
    "flash-attn",
    "math-verify",
    "matplotlib",
    "gguf",
)
WIDTH = 14


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--model", help="preset, directory, GGUF file or Hub id (org/name) to judge")


def run(options: argparse.Namespace) -> None:
    """Print what is installed and what works; refuse a model that is not supported."""
    import torch

    from seergate.eval.environment import git_revision, processor, version_of

    _line("seergate", f"{__version__} (git {git_revision() or 'unknown'})")
    _line("python", platform.python_version())
    for package in PACKAGES:
        _line(package, version_of(package) or "not installed")
    _line("cpu", f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            _line(f"cuda:{i}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    else:
        _line("cuda", "no device")
    _try_backends()
    for name, place in ((TINY, TINY_MODEL), ("its gates", TINY_GATES)):
        try:
            _line(name, str(shipped(place)))
        except FileNotFoundError:
            _line(name, "missing from this installation")
    if options.model is not None:
        _judge(options.model)


def _line(name: str, value: str) -> None:
    print(f"{name:<{WIDTH}} {value}")


def _try_backends() -> None:
    """Try each backend of the ops on a small problem."""
    import torch

    from seergate import ops
    from seergate.ops.backend import ENV_VAR

    before = os.environ.get(ENV_VAR)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k = torch.randn(1, 2, 16, device=device), torch.randn(1, 1, 64, 16, device=device)
    indices = torch.tensor([[[0, 3]]], dtype=torch.int32, device=device)
    lengths = torch.tensor([64], device=device)
    for name in ("reference", "torch", "triton"):
        if name == "triton" and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            _line(f"ops {name}", "not usable: no GPU here")
            continue
        try:
            os.environ[ENV_VAR] = name
            ops.sparse_decode(q, k, k, indices, lengths, 16)
            _line(f"ops {name}", f"works on {device}")
        except Exception as error:  # this command reports any failure
            reason = " ".join(str(error).split()) or type(error).__name__
            _line(f"ops {name}", f"not usable: {reason.removeprefix(f'{ENV_VAR} is {name!r} and ')}")
        finally:
            os.environ.pop(ENV_VAR)
    if before is not None:
        os.environ[ENV_VAR] = before


def _judge(name: str) -> None:
    """Print whether a model can be gated, according to its configuration."""
    from seergate.distill.estimate import architecture
    from seergate.models.families import gate_geometry
    from seergate.models.loading import skeleton

    shape = gate_geometry(skeleton(architecture(load_train_config(name))), GateConfig(rope=False))
    print(
        f"{model_path(name)}: supported. {shape.model_type}, {len(shape.layers)} of {shape.num_layers} layers can be "
        f"gated, {shape.num_heads} query heads on {shape.num_kv_heads} KV heads."
    )
