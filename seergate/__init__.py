"""seergate: learned attention gates for sparse decoding of frozen reasoning models (SeerAttention-R).

>>> import seergate
>>> model = seergate.load("org/Qwen3-8B-gates", token_budget=4096)  # an ordinary transformers model   # doctest: +SKIP
>>> with seergate.attached(model, "quest", token_budget=2048):      # any method, by name              # doctest: +SKIP
...     model.generate(...)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from seergate.version import __version__ as __version__

if TYPE_CHECKING:
    from seergate import methods as methods
    from seergate import ops as ops
    from seergate.cache.offload import Offload as Offload
    from seergate.cache.paging import Paging as Paging
    from seergate.config import DecodeConfig as DecodeConfig
    from seergate.config import GateConfig as GateConfig
    from seergate.config import Rectify as Rectify
    from seergate.errors import SeergateError as SeergateError
    from seergate.models.attach import Handle as Handle
    from seergate.models.attach import attach as attach
    from seergate.models.attach import attached as attached
    from seergate.models.attach import handle_of as handle_of
    from seergate.models.gate_bank import GateBank as GateBank
    from seergate.models.gated_model import load as load
    from seergate.models.score import Scores as Scores
    from seergate.models.score import score as score

_HOMES = {
    "GateConfig": "seergate.config",
    "DecodeConfig": "seergate.config",
    "GateBank": "seergate.models.gate_bank",
    "Rectify": "seergate.config",
    "SeergateError": "seergate.errors",
    "Handle": "seergate.models.attach",
    "attach": "seergate.models.attach",
    "attached": "seergate.models.attach",
    "handle_of": "seergate.models.attach",
    "Offload": "seergate.cache.offload",
    "Paging": "seergate.cache.paging",
    "load": "seergate.models.gated_model",
    "Scores": "seergate.models.score",
    "score": "seergate.models.score",
}
_SUBMODULES = ("distill", "eval", "methods", "ops")

__all__ = [*_HOMES, "distill", "methods", "ops"]  # not eval, which is a builtin


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that ``import seergate`` is fast and has no side effects."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _SUBMODULES:
        return import_module(f"seergate.{name}")
    raise AttributeError(f"module 'seergate' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_SUBMODULES})
