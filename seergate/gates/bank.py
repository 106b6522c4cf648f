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
from seergate.gates import (
    Adapter,
    AdapterDiff,
    average,
    check_repo_id,
    check_tensors,
    diff,
    publish,
    save_adapter,
    subset,
)
from seergate.gates.gate import AttnGate
from seergate.geometry import ModelGeometry


class Gates(nn.Module):
    """The gates of one model, without anything that needs the model itself; users have its subclass `GateBank`.

    The state dict is the adapter: ``layers.{i}.{q_proj,k_proj,q_norm,k_norm}.weight``.

    Args:
        config: the architecture, the same for all layers.
        geometry: the model that the gates are for.
        training: how they were trained; saved with them.

    Attributes:
        decode_defaults, results, licence: see `Adapter`; saved with the gates.
    """

    def __init__(self, config: GateConfig, geometry: ModelGeometry, training: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.config, self.geometry = config, geometry
        self.training_record = dict(training or {})
        self.decode_defaults: dict[str, Any] = {}
        self.results: tuple[dict[str, Any], ...] = ()
        self.licence: dict[str, str] = {}
        inv_freq = torch.tensor(geometry.inv_freq, dtype=torch.float32) if config.rope else None
        self.layers = nn.ModuleDict(
            {
                str(layer): AttnGate(
                    config,
                    num_heads=geometry.num_heads,
                    num_kv_heads=geometry.num_kv_heads,
                    head_dim=geometry.head_dim,
                    inv_freq=inv_freq,
                    attention_scaling=geometry.attention_scaling,
                )
                for layer in geometry.layers
            }
        )

    def gate(self, layer: int) -> AttnGate:
        """The gate of one layer of the model."""
        gate = self.layers[str(layer)]
        assert isinstance(gate, AttnGate)
        return gate

    def __iter__(self) -> Iterator[tuple[int, AttnGate]]:
        """Pairs of layer index and gate, ascending."""
        return ((layer, self.gate(layer)) for layer in self.geometry.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def decode_config(self, **given: Any) -> DecodeConfig:
        """How to decode with these gates: what they ask for themselves (`decode_defaults`), overruled by ``given``.

        A rule that is given (budget, threshold or top-p) takes the place of theirs.
        """
        rules = {"token_budget", "threshold", "top_p"}
        kept = {key: value for key, value in self.decode_defaults.items() if not (key in rules and rules & set(given))}
        return DecodeConfig(**{**kept, **given})

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *,
        max_shard_size: int | str = "5GB",
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **push_options: Any,
    ) -> None:
        """Write the adapter: `gate_config.json`, `gate_model.safetensors`, `README.md`.

        Args:
            save_directory: made if need be. An adapter that is there is replaced in one step.
            max_shard_size: of one weights file.
            push_to_hub: also upload it.
            repo_id: where to; by default the directory's name, in one's own namespace.
            **push_options: see `push_to_hub`.

        Raises:
            SeergateError: if it cannot be written or uploaded.
        """
        idle = [*(["repo_id"] if repo_id is not None else []), *push_options]
        if idle and not push_to_hub:
            raise SeergateError(f"{', '.join(idle)} needs push_to_hub=True")
        target = repo_id or Path(save_directory).resolve().name
        if push_to_hub:
            check_repo_id(target)
        save_adapter(self.to_adapter(), save_directory, max_shard_size=max_shard_size)
        if push_to_hub:
            self.push_to_hub(target, max_shard_size=max_shard_size, **push_options)

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
        check_tensors(adapter, adapter.signature, source)
        bank = cls(adapter.gate, adapter.geometry, adapter.training)
        bank.decode_defaults, bank.results, bank.licence = dict(adapter.decode), adapter.results, dict(adapter.licence)
        if adapter.dtype is not None:
            bank.to(adapter.dtype)
        bank.load_state_dict(adapter.tensors)
        return bank

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        subfolder: str | None = None,
        commit_message: str = "Upload attention gates",
        commit_description: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str = "5GB",
    ) -> str:
        """Save and upload the adapter, in one commit; what an owner wrote around the card stays.

        Args:
            repo_id: ``org/name``, or ``name`` in one's own namespace; made if need be.
            private: whether a new repository is private.
            token: for the Hub; by default the one of ``hf auth login``.
            revision: branch; made if need be.
            subfolder: where in the repository.
            commit_message, commit_description: of the commit or the pull request.
            create_pr: open a pull request instead of committing.
            max_shard_size: of one weights file.

        Returns:
            The address of the commit or of the pull request.

        Raises:
            SeergateError: if the Hub refuses, with its reason.
        """
        return publish(
            self.to_adapter(),
            repo_id,
            private=private,
            token=token,
            revision=revision,
            subfolder=subfolder,
            commit_message=commit_message,
            commit_description=commit_description,
            create_pr=create_pr,
            max_shard_size=max_shard_size,
        )

    @classmethod
    def average(cls, banks: Sequence[Gates], weights: Sequence[float] | None = None) -> Self:
        """The weighted mean of gates for the same model (`adapter.average`)."""
        return cls.from_adapter(average([bank.to_adapter() for bank in banks], weights), "the average")

    def subset(self, layers: Iterable[int]) -> Self:
        """The gates of some layers, as a bank of its own; the model's other layers stay dense."""
        copied = subset(self.to_adapter(), layers)
        return type(self).from_adapter(copied, "the subset")

    def diff(self, other: Gates) -> AdapterDiff:
        """What these gates and others differ in, field by field and tensor by tensor."""
        return diff(self.to_adapter(), other.to_adapter())
