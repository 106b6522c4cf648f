"""Decoding methods, one file per idea. All share the cache, the attention op and the evaluation harness.

Everything that a new method needs is exported here; docs/write_a_method.md shows how one is written.
"""

from __future__ import annotations

from seergate.checks import check_choice, check_counts, check_flags, check_share
from seergate.methods.base import AttentionOutput, LayerSpec, LayerState, Method, Rotary, Step
from seergate.methods.controls import Dense, Oracle, Random, RandomEvict
from seergate.methods.evicting import (
    BudgetedMethod,
    BudgetedState,
    CompressingMethod,
    CompressingState,
    EvictingMethod,
    EvictingState,
    Eviction,
    LongPromptWarning,
)
from seergate.methods.gate import Gate
from seergate.methods.gate_on_evictor import GateOnEvictor
from seergate.methods.h2o import H2O
from seergate.methods.kv4bit import KV4Bit
from seergate.methods.lazy_eviction import LazyEviction
from seergate.methods.quest import Quest, ReSA
from seergate.methods.raas import RaaS
from seergate.methods.reason_cache.method import RandomSharing, ReasonCache
from seergate.methods.registry import (
    METHODS,
    has_gates,
    load_plugins,
    make_method,
    method_class,
    option_names,
    register,
)
from seergate.methods.retention import FastKVzip, RetentionMethod, RetentionState, TrimKV
from seergate.methods.rpc import RPC
from seergate.methods.selecting import SelectingMethod, SelectingState
from seergate.methods.snapkv import RKV, SnapKV
from seergate.methods.streaming_llm import StreamingLLM
from seergate.methods.tova import TOVA
from seergate.methods.tri_attention import TriAttention

for _method in (
    *(Dense, KV4Bit, Oracle, Gate, Quest, ReSA, Random),
    *(StreamingLLM, H2O, TOVA, SnapKV, RKV, RaaS, RPC, LazyEviction, TriAttention, FastKVzip, TrimKV, RandomEvict),
    *(ReasonCache, RandomSharing),
):
    register(_method)

__all__ = [
    "H2O",
    "METHODS",
    "RKV",
    "RPC",
    "TOVA",
    "AttentionOutput",
    "BudgetedMethod",
    "BudgetedState",
    "CompressingMethod",
    "CompressingState",
    "Dense",
    "EvictingMethod",
    "EvictingState",
    "Eviction",
    "FastKVzip",
    "Gate",
    "GateOnEvictor",
    "KV4Bit",
    "LayerSpec",
    "LayerState",
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
    "RetentionMethod",
    "RetentionState",
    "Rotary",
    "SelectingMethod",
    "SelectingState",
    "SnapKV",
    "Step",
    "StreamingLLM",
    "TriAttention",
    "TrimKV",
    "check_choice",
    "check_counts",
    "check_flags",
    "check_share",
    "has_gates",
    "load_plugins",
    "make_method",
    "method_class",
    "option_names",
    "register",
]
