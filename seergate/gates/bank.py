"""GateBank: one gate per gated layer of a model. It owns only gates, never the base model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from seergate.config import DecodeConfig, GateConfig
from seergate.errors import SeergateError
from seergate.gates import (
    Adapter,
    AdapterDiff,
    average,
    check_repo_id,
    check_tensors,
    diff,
    is_hub_id,
    load_adapter,
    only_commit,
    publish,
    save_adapter,
    subset,
)
from seergate.gates.gate import AttnGate
from seergate.geometry import ModelGeometry

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class GateBank(nn.Module):
    """The gates of one model.

    Usually made by `for_model` or `from_pretrained`. Its parameters are all there is to train, and its state dict is
    the adapter: ``layers.{i}.{q_proj,k_proj,q_norm,k_norm}.weight``.

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

    @classmethod
    def for_model(cls, model: PreTrainedModel, config: GateConfig | None = None) -> GateBank:
        """Fresh gates for a model: linear weights Normal(0, 0.02), norm weights 1, on the CPU in fp32.

        Args:
            model: a causal language model of a supported family; its weights are not touched.
            config: the gates' architecture; by default the paper's, with the gate as wide as the model's heads.

        Raises:
            SeergateError: if the family is not supported, with the reason.
            ValueError: if the configuration does not fit the model.
        """
        from seergate.hf.families import gate_geometry, head_dim_of  # a door up: only the host knows how models look

        if config is None:
            config = GateConfig(gate_dim=head_dim_of(model))
        if not isinstance(config, GateConfig):
            raise SeergateError(f"config is a {type(config).__name__}; it must be a GateConfig")
        geometry = gate_geometry(model, config)
        if geometry.base_revision is None and geometry.base_model is not None and is_hub_id(geometry.base_model):
            # some releases of transformers do not remember which commit they loaded
            geometry = replace(geometry, base_revision=only_commit(geometry.base_model))
        return cls(config, geometry)

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

    def distill_loss(
        self,
        model: PreTrainedModel,
        *,
        input_ids: Tensor,
        cu_seqlens: Tensor | None = None,
        row_start: float = 0.5,
        reduction: str = "row_mean",
    ) -> Tensor:
        """How far the gates are from the model's own attention; ``.backward()`` gives the gates' gradients.

        The frozen model runs once, without its LM head. The gradients are computed on the way, layer by layer.

        Args:
            model: the base model.
            input_ids: ``[1, T]`` or ``[T]``, a pack of sequences.
            cu_seqlens: int32 ``[n + 1]``, where each sequence begins and the last one ends; one sequence if ``None``.
            row_start: rows of each sequence before ``int(length * row_start)`` do not count.
            reduction: ``"row_mean"``, the mean over layers of the mean KL in nats per row and KV head, or
                ``"published"``, the published weighting summed over layers (`ops.gate_kl`).

        Returns:
            A scalar.

        Raises:
            SeergateError: if the gates do not fit the model.
            ValueError: for ids that the model does not have, or a malformed pack.
        """
        from seergate.distill.teacher_forward import distill_step  # a door up: the loss needs the model's own forward

        if not callable(getattr(model, "get_input_embeddings", None)):
            raise SeergateError(
                f"model is a {type(model).__name__}; it must be a causal language model of transformers"
            )
        if not isinstance(input_ids, torch.Tensor):
            raise ValueError(f"input_ids is a {type(input_ids).__name__}; it must be a tensor of token ids")
        vocabulary = model.get_input_embeddings().num_embeddings
        if input_ids.dtype not in (torch.int32, torch.int64) or input_ids.numel() == 0:
            raise ValueError(
                f"input_ids is {input_ids.dtype} of shape {tuple(input_ids.shape)}; it must hold token ids (int64)"
            )
        lowest, highest = int(input_ids.min()), int(input_ids.max())
        if lowest < 0 or highest >= vocabulary:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(f"input_ids holds {wrong}; the model has the ids 0..{vocabulary - 1}")
        return distill_step(self, model, input_ids, cu_seqlens, row_start=row_start, reduction=reduction).loss

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
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        revision: str | None = None,
        subfolder: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> GateBank:
        """Load an adapter from a directory or the Hub.

        Args:
            pretrained_model_name_or_path: directory, or Hub repository ``org/name``.
            revision, subfolder, token, cache_dir, local_files_only, force_download: see `load_adapter`.
            dtype: convert the gates; by default they stay as they were saved.
            device: put them there; by default on the CPU.

        Raises:
            SeergateError: if it is missing, damaged, or a tensor is missing, left over or of the wrong shape.
        """
        adapter = load_adapter(
            pretrained_model_name_or_path,
            revision=revision,
            subfolder=subfolder,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            force_download=force_download,
        )
        return cls.from_adapter(adapter, str(pretrained_model_name_or_path)).to(device=device, dtype=dtype)

    @classmethod
    def from_adapter(cls, adapter: Adapter, source: str = "the adapter") -> GateBank:
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
    def average(cls, banks: Sequence[GateBank], weights: Sequence[float] | None = None) -> GateBank:
        """The weighted mean of gates for the same model (`adapter.average`)."""
        return cls.from_adapter(average([bank.to_adapter() for bank in banks], weights), "the average")

    def subset(self, layers: Iterable[int]) -> GateBank:
        """The gates of some layers, as a bank of its own; the model's other layers stay dense."""
        copied = subset(self.to_adapter(), layers)
        return type(self).from_adapter(copied, "the subset")

    def diff(self, other: GateBank) -> AdapterDiff:
        """What these gates and others differ in, field by field and tensor by tensor."""
        return diff(self.to_adapter(), other.to_adapter())
