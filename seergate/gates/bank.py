"""Gates: one gate per gated layer of a model. They own only their weights, never the base model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from seergate.config import DecodeConfig, GateConfig
from seergate.errors import SeergateError
from seergate.gates.files import save_adapter
from seergate.gates.hub import check_repo_id, push_adapter
from seergate.gates.merging import AdapterDiff, average, diff, subset
from seergate.gates.record import Adapter, check_adapter
from seergate.gates.retention import RetentionGate
from seergate.gates.scorer import Scorer
from seergate.gates.scorers import make_scorer
from seergate.geometry import ModelGeometry


class Gates(nn.Module):
    """The gates of one model, without anything that needs the model itself; users have its subclass `GateBank`.

    The state dict is the adapter: ``layers.{i}.`` and the names of the scorer, such as ``q_proj.weight``.

    Args:
        config: the architecture, the same for all layers.
        geometry: the model that the gates are for.
        training: how they were trained; saved with them.

    Attributes:
        decode_defaults, results, licence: see `Adapter`; saved with the gates.
        source: the directory or Hub id that they were loaded from, or empty.
    """

    def __init__(self, config: GateConfig, geometry: ModelGeometry, training: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.config, self.geometry = config, geometry
        self.training_record = dict(training or {})
        self.decode_defaults: dict[str, Any] = {}
        self.results: tuple[dict[str, Any], ...] = ()
        self.licence: dict[str, str] = {}
        self.source = ""
        self.layers = nn.ModuleDict({str(layer): make_scorer(config, geometry) for layer in geometry.layers})

    def gate(self, layer: int) -> Scorer:
        """The gate of one layer of the model."""
        gate = self.layers[str(layer)]
        assert isinstance(gate, Scorer)
        return gate

    def retention_gate(self, layer: int) -> RetentionGate:
        """The gate of one layer, of gates that score tokens for eviction (``config.retention``)."""
        gate = self.layers[str(layer)]
        assert isinstance(gate, RetentionGate)
        return gate

    def __iter__(self) -> Iterator[tuple[int, Scorer]]:
        """Pairs of layer index and gate, ascending."""
        return ((layer, self.gate(layer)) for layer in self.geometry.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def decode_config(self, **given: Any) -> DecodeConfig:
        """The decode configuration of these gates: their `decode_defaults`, overruled by ``given``.

        A rule that is given (budget, threshold or top-p) takes the place of theirs.
        """
        rules = {"token_budget", "threshold", "top_p"}
        kept = {key: value for key, value in self.decode_defaults.items() if not (key in rules and rules & set(given))}
        return DecodeConfig(**{**kept, **given})

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **push_options: Any,
    ) -> None:
        """Write the adapter: `gate_config.json`, `gate_model.safetensors`, `README.md`.

        Args:
            save_directory: made if need be. An adapter that is there is replaced.
            push_to_hub: also upload it.
            repo_id: where to; by default the directory's name, in one's own namespace.
            **push_options: further arguments of `push_to_hub`.

        Raises:
            SeergateError: if it cannot be written or uploaded.
        """
        idle = [*(["repo_id"] if repo_id is not None else []), *push_options]
        if idle and not push_to_hub:
            raise SeergateError(f"{', '.join(idle)} needs push_to_hub=True")
        target = repo_id or Path(save_directory).resolve().name
        if push_to_hub:
            check_repo_id(target)
        save_adapter(self.to_adapter(), save_directory)
        if push_to_hub:
            self.push_to_hub(target, **push_options)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload the adapter in one commit and return the address of that commit, or of the pull request.

        Args:
            repo_id: ``org/name``, or ``name`` in one's own namespace; made if need be.
            **options: ``private``, ``token``, ``revision``, ``subfolder``, ``commit_message``,
                ``commit_description``, ``create_pr``, ``card``: what `seergate.gates.push_adapter` takes.

        Raises:
            SeergateError: if the Hub refuses, with its reason.
        """
        return push_adapter(self.to_adapter(), repo_id, **options)

    def to_adapter(self) -> Adapter:
        """The adapter's contents."""
        return Adapter(
            gate=self.config,
            geometry=self.geometry,
            tensors=dict(self.state_dict()),
            training=self.training_record,
            decode=self.decode_defaults,
            results=tuple(self.results),
            licence=self.licence,
        )

    @classmethod
    def from_adapter(cls, adapter: Adapter, source: str = "the adapter") -> Self:
        """Build the bank an adapter describes, accounting for every tensor."""
        check_adapter(adapter, source)
        with torch.device("cpu"):
            bank = cls(adapter.gate, adapter.geometry, adapter.training)
        bank.decode_defaults, bank.results, bank.licence = dict(adapter.decode), adapter.results, dict(adapter.licence)
        if adapter.dtype is not None:
            bank.to(adapter.dtype)
        bank.load_state_dict(adapter.tensors)
        return bank

    @classmethod
    def average(cls, banks: Sequence[Gates], weights: Sequence[float] | None = None) -> Self:
        """The weighted mean of gates for the same model; results measured with the parts do not hold for the mean."""
        return cls.from_adapter(average([bank.to_adapter() for bank in banks], weights), "the average")

    def subset(self, layers: Iterable[int]) -> Self:
        """The gates of some layers, as a bank of its own; the model's other layers stay dense."""
        copied = subset(self.to_adapter(), layers)
        return type(self).from_adapter(copied, "the subset")

    def diff(self, other: Gates) -> AdapterDiff:
        """Differences from other gates, field by field and tensor by tensor."""
        return diff(self.to_adapter(), other.to_adapter())
