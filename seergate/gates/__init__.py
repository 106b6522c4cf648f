"""Adapters: gates as files. `gate_config.json`, `gate_model.safetensors`, a model card; never a pickle."""

from __future__ import annotations

from seergate.gates.card import Source
from seergate.gates.hub import cached_commit, check_repo_id, fetch, is_hub_id, only_commit
from seergate.gates.layout import CARD_FILE, CONFIG_FILE, WEIGHTS_FILE, is_sign
from seergate.gates.merging import AdapterDiff, average, cast, diff, subset
from seergate.gates.pushing import publish, push_adapter
from seergate.gates.reading import load_adapter
from seergate.gates.record import SCHEMA_VERSION, Adapter, check_finite, check_tensors
from seergate.gates.saving import save_adapter

__all__ = [
    "CARD_FILE",
    "CONFIG_FILE",
    "SCHEMA_VERSION",
    "WEIGHTS_FILE",
    "Adapter",
    "AdapterDiff",
    "Source",
    "average",
    "cached_commit",
    "cast",
    "check_finite",
    "check_repo_id",
    "check_tensors",
    "diff",
    "fetch",
    "is_hub_id",
    "is_sign",
    "load_adapter",
    "only_commit",
    "publish",
    "push_adapter",
    "save_adapter",
    "subset",
]
