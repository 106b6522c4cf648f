"""GateBank: one gate per gated layer of a model. It owns only gates, never the base model."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from seergate.adapter import Adapter, load_adapter, push_adapter, save_adapter
from seergate.config import GateConfig
from seergate.errors import SeergateError
from seergate.gate import AttnGate
from seergate.geometry import ModelGeometry

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds finite floating-point numbers only."""
    return tensor.is_floating_point() and bool(tensor.isfinite().all())


class GateBank(nn.Module):
    """The gates of one model.

    Usually made by `for_model` or `from_pretrained`. Its parameters are all there is to train, and its state dict is
    the adapter: ``layers.{i}.{q_proj,k_proj,q_norm,k_norm}.weight``.

    Args:
        config: the architecture, the same for all layers.
        geometry: the model that the gates are for.
        training: how they were trained; saved with them.
    """

    def __init__(self, config: GateConfig, geometry: ModelGeometry, training: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.config, self.geometry = config, geometry
        self.training_record = dict(training or {})
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
        from seergate.host.families import gate_geometry, head_dim_of  # a door up: only the host knows how models look

        if config is None:
            config = GateConfig(gate_dim=head_dim_of(model))
        return cls(config, gate_geometry(model, config))

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
        """
        from seergate.distill.teacher_forward import distill_step  # a door up: the loss needs the model's own forward

        return distill_step(self, model, input_ids, cu_seqlens, row_start=row_start, reduction=reduction).loss

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        """Write the adapter: `gate_config.json`, `gate_model.safetensors`, `README.md`."""
        save_adapter(self.to_adapter(), save_directory)

    def to_adapter(self) -> Adapter:
        """The adapter's contents."""
        return Adapter(self.config, self.geometry, dict(self.state_dict()), self.training_record)

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
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> GateBank:
        """Load an adapter from a directory or the Hub.

        Raises:
            SeergateError: if it is missing, corrupt, or a tensor is missing, left over or of the wrong shape.
        """
        adapter = load_adapter(
            pretrained_model_name_or_path,
            revision=revision,
            subfolder=subfolder,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
        )
        return cls.from_adapter(adapter, str(pretrained_model_name_or_path)).to(device=device, dtype=dtype)

    @classmethod
    def from_adapter(cls, adapter: Adapter, source: str = "the adapter") -> GateBank:
        """Build the bank an adapter describes, accounting for every tensor."""
        try:
            with torch.device("meta"):
                expected = {
                    name: tensor.shape for name, tensor in cls(adapter.gate, adapter.geometry).state_dict().items()
                }
            bank = cls(adapter.gate, adapter.geometry, adapter.training)
        except (ValueError, TypeError) as error:
            raise SeergateError(f"{source}: {error}") from error
        found = {name: tensor.shape for name, tensor in adapter.tensors.items()}
        for name in sorted(expected.keys() | found.keys()):
            if name not in found:
                raise SeergateError(
                    f"{source}: the tensor {name} is missing; its shape must be {tuple(expected[name])}"
                )
            if name not in expected:
                raise SeergateError(f"{source}: the tensor {name} belongs to no gate that its configuration describes")
            if found[name] != expected[name]:
                raise SeergateError(
                    f"{source}: the tensor {name} has shape {tuple(found[name])}; it must be {tuple(expected[name])}"
                )
            if not _is_finite(adapter.tensors[name]):
                raise SeergateError(f"{source}: the tensor {name} holds values that are not finite numbers")
        bank.load_state_dict(adapter.tensors)
        kinds = {tensor.dtype for tensor in adapter.tensors.values()}
        return bank.to(kinds.pop()) if len(kinds) == 1 else bank

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str = "Upload attention gates",
        create_pr: bool = False,
    ) -> str:
        """Save and upload the adapter; returns the commit's address."""
        with tempfile.TemporaryDirectory() as directory:
            self.save_pretrained(directory)
            return push_adapter(
                directory,
                repo_id,
                private=private,
                token=token,
                revision=revision,
                commit_message=commit_message,
                create_pr=create_pr,
            )
