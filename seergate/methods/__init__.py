"""Decoding methods: one file, one dataclass each. All share the cache, the attention op and the evaluation harness."""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from seergate.errors import SeergateError
from seergate.methods.base import Method, SelectingMethod
from seergate.methods.dense import Dense
from seergate.methods.evicting import EvictingMethod, LongPromptWarning
from seergate.methods.gate import Gate
from seergate.methods.gate_on_evictor import SUFFIX, GateOnEvictor
from seergate.methods.h2o import H2O
from seergate.methods.kv4bit import KV4Bit
from seergate.methods.lazy_eviction import LazyEviction
from seergate.methods.oracle import Oracle
from seergate.methods.quest import Quest
from seergate.methods.r_kv import RKV
from seergate.methods.raas import RaaS
from seergate.methods.random import Random
from seergate.methods.random_evict import RandomEvict
from seergate.methods.resa import ReSA
from seergate.methods.rpc import RPC
from seergate.methods.snapkv import SnapKV
from seergate.methods.streaming_llm import StreamingLLM
from seergate.methods.tova import TOVA
from seergate.methods.tri_attention import TriAttention
from seergate.reason.method import RandomSharing, ReasonCache

if TYPE_CHECKING:
    from seergate.gates.bank import Gates

_ALL = (
    *(Gate, Oracle, Quest, ReSA, Dense, Random),
    *(StreamingLLM, H2O, TOVA, SnapKV, RKV, RaaS, RPC, LazyEviction, RandomEvict, TriAttention, KV4Bit),
    *(ReasonCache, RandomSharing),
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
    "GateOnEvictor",
    "KV4Bit",
    "LazyEviction",
    "LongPromptWarning",
    "Method",
    "Oracle",
    "Quest",
    "RaaS",
    "Random",
    "RandomEvict",
    "RandomSharing",
    "ReSA",
    "ReasonCache",
    "SelectingMethod",
    "SnapKV",
    "StreamingLLM",
    "TriAttention",
    "has_gates",
    "make_method",
    "method_class",
    "option_names",
]


def method_class(name: str) -> type[Method]:
    """The class of a method. ``EVICTOR+gate`` names a `GateOnEvictor`, ``reason_cache+gate`` a `ReasonCache` that is
    read with the gate.

    Raises:
        SeergateError: for an unknown name, with the nearest known one.
    """
    if name.endswith(SUFFIX):
        keeps = method_class(name.removesuffix(SUFFIX))
        if name.count("+") == 1 and issubclass(keeps, ReasonCache):
            return keeps
        if name.count("+") > 1 or not issubclass(keeps, EvictingMethod):
            raise SeergateError(
                f"{name!r} is no method: only one that evicts or shares blocks can have the gate on what it keeps"
            )
        return GateOnEvictor
    if name in METHODS:
        return METHODS[name]
    near = difflib.get_close_matches(name, METHODS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise SeergateError(f"there is no method {name!r}; {hint}known are {', '.join(sorted(METHODS))}")


def has_gates(name: str) -> bool:
    """Whether a method decodes with gates."""
    return name == Gate.name or name.endswith(SUFFIX)


def option_names(name: str) -> set[str]:
    """The options that `make_method` takes for a method, ``bank`` left out.

    Raises:
        SeergateError: for an unknown name.
    """
    if method_class(name) is GateOnEvictor:
        return option_names(name.removesuffix(SUFFIX)) | {"read_budget"}
    if name.endswith(SUFFIX):
        return option_names(name.removesuffix(SUFFIX)) - {"reads"} | option_names(Gate.name)
    own = {f.name for f in fields(method_class(name)) if f.init} - {"bank"}
    return own - {"block_size"} if name == Gate.name else own  # gates have their block size


def make_method(name: str, *, bank: Gates | None = None, **options: Any) -> Method:
    """Build a method by name.

    Args:
        name: a key of `METHODS`; or ``EVICTOR+gate``, which takes the evictor's options, ``bank`` and
            ``read_budget``, the gate's token budget; or ``reason_cache+gate``, which takes ``bank`` and the options
            of both.
        bank: the gates, for methods that have them.
        **options: the method's own.

    Raises:
        SeergateError: for an unknown name or option.
        ValueError: for an option out of range.
    """
    kind, known = method_class(name), option_names(name)
    unknown = sorted(set(options) - known)
    if unknown:
        has = ", ".join(sorted(known)) or "none"
        raise SeergateError(f"the method {name!r} has no option {', '.join(map(repr, unknown))}; it has {has}")
    if not has_gates(name):
        if bank is not None:
            raise SeergateError(f"the method {name!r} has no gates; leave out bank=")
    elif bank is None:
        raise SeergateError(f"the method {name!r} needs gates: pass a GateBank instead of its name, or bank=")
    elif kind is Gate:
        return Gate.from_config(bank, bank.decode_config(**options))
    elif issubclass(kind, ReasonCache):
        reading = {key: options.pop(key) for key in option_names(Gate.name) & set(options)}
        return kind(reads=make_method(Gate.name, bank=bank, **reading), **options)
    else:
        if "read_budget" not in options:
            raise SeergateError(f"the method {name!r} needs read_budget=, how many tokens the gate may read per step")
        gate = Gate.from_config(bank, bank.decode_config(token_budget=options.pop("read_budget")))
        evictor = make_method(name.removesuffix(SUFFIX), **options)
        assert isinstance(evictor, EvictingMethod)
        return GateOnEvictor(evictor=evictor, gate=gate)
    if kind is TriAttention and "centres" not in options:
        raise SeergateError("the method 'tri_attention' needs centres=, the file that seergate calibrate writes")
    return kind(**options)
