"""Adapters: gates as files. `gate_config.json`, `gate_model.safetensors`, a model card; never a pickle."""

from __future__ import annotations

from seergate.adapter.card import Source
from seergate.adapter.hub import cached_commit, check_repo_id, fetch, is_hub_id, only_commit
from seergate.adapter.layout import CARD_FILE, CONFIG_FILE, WEIGHTS_FILE, is_sign
from seergate.adapter.merging import AdapterDiff, average, cast, diff, subset
from seergate.adapter.pushing import publish, push_adapter
from seergate.adapter.reading import load_adapter
from seergate.adapter.record import SCHEMA_VERSION, Adapter, check_finite, check_tensors
from seergate.adapter.saving import save_adapter

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
