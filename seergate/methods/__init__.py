"""Decoding methods: one file, one dataclass each. All share the cache, the attention op and the evaluation harness."""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import Any

from seergate.errors import SeergateError
from seergate.methods.base import EvictingMethod, Method, SelectingMethod
from seergate.methods.dense import Dense
from seergate.methods.gate import Gate
from seergate.methods.h2o import H2O
from seergate.methods.lazy_eviction import LazyEviction
from seergate.methods.oracle import Oracle
from seergate.methods.quest import Quest
from seergate.methods.r_kv import RKV
from seergate.methods.raas import RaaS
from seergate.methods.random import Random
from seergate.methods.random_evict import RandomEvict
from seergate.methods.rpc import RPC
from seergate.methods.snapkv import SnapKV
from seergate.methods.streaming_llm import StreamingLLM
from seergate.methods.tova import TOVA
from seergate.methods.tri_attention import TriAttention

_ALL = (
    *(Gate, Oracle, Quest, Dense, Random),
    *(StreamingLLM, H2O, TOVA, SnapKV, RKV, RaaS, RPC, LazyEviction, RandomEvict, TriAttention),
)
METHODS: dict[str, type[Method]] = {method.name: method for method in _ALL}

__all__ = [
    "H2O",
    "METHODS",
    "RKV",
    "RPC",
    "TOVA",
    "Dense",
    "EvictingMethod",
    "Gate",
    "LazyEviction",
    "Method",
    "Oracle",
    "Quest",
    "RaaS",
    "Random",
    "RandomEvict",
    "SelectingMethod",
    "SnapKV",
    "StreamingLLM",
    "TriAttention",
    "make_method",
    "method_class",
]


def method_class(name: str) -> type[Method]:
    """The class of a method.

    Raises:
        SeergateError: for an unknown name, with the nearest known one.
    """
    if name in METHODS:
        return METHODS[name]
    near = difflib.get_close_matches(name, METHODS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise SeergateError(f"there is no method {name!r}; {hint}known are {', '.join(sorted(METHODS))}")


def make_method(name: str, **options: Any) -> Method:
    """Build a method by name.

    Raises:
        SeergateError: for an unknown name or option.
        ValueError: for an option out of range.
    """
    kind = method_class(name)
    known = {f.name for f in fields(kind) if f.init}
    unknown = sorted(set(options) - known)
    if unknown:
        has = ", ".join(sorted(known)) or "none"
        raise SeergateError(f"the method {name!r} has no option {', '.join(map(repr, unknown))}; it has {has}")
    if name == Gate.name and "bank" not in options:
        raise SeergateError("the method 'gate' needs gates: pass a GateBank instead of its name, or bank=")
    if name == TriAttention.name and "centres" not in options:
        raise SeergateError("the method 'tri_attention' needs centres=, the file that seergate calibrate writes")
    return kind(**options)
