"""GateBank: gates with the operations that need a model: creating, distilling, loading, saving and uploading them."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from seergate.checks import check_one_of
from seergate.config import GateConfig, check_recipe
from seergate.errors import SeergateError
from seergate.gates import Gates, push_adapter, save_adapter
from seergate.gates.bank import DTYPES
from seergate.hub import only_commit
from seergate.models.families import check_gates, gate_geometry, head_dim_of
from seergate.models.published import load_gates
from seergate.paths import is_hub_id

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class GateBank(Gates):
    """The gates of one model, usually created by `for_model` or `from_pretrained`.

    Only the gates are parameters of this module; the base model is not part of it.
    """

    @classmethod
    def for_model(cls, model: PreTrainedModel, config: GateConfig | None = None) -> GateBank:
        """Create fresh gates for a model on the CPU in float32: linear weights Normal(0, 0.02), norm weights 1.

        Args:
            model: a causal language model of a supported family; it is not changed.
            config: the gates' architecture; by default the paper's, with the model's head dimension as ``gate_dim``.

        Raises:
            SeergateError: if the family is not supported, with the reason.
            ValueError: if the configuration does not fit the model.
        """
        if config is None:
            config = GateConfig(gate_dim=head_dim_of(model))
        if not isinstance(config, GateConfig):
            raise SeergateError(f"config is a {type(config).__name__}; it must be a GateConfig")
        geometry = gate_geometry(model, config)
        if geometry.base_revision is None and geometry.base_model is not None and is_hub_id(geometry.base_model):
            # some releases of transformers do not record the commit that they loaded
            geometry = replace(geometry, base_revision=only_commit(geometry.base_model))
        with torch.device("cpu"):  # independent of the default device
            return cls(config, geometry)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **hub: Any,
    ) -> GateBank:
        """Load gates from a directory or the Hub: an adapter, or a published SeerAttention-R checkpoint.

        Args:
            pretrained_model_name_or_path: directory, or Hub repository ``org/name``.
            dtype: dtype to convert the gates to; by default, that of the file.
            device: device of the gates; by default, the CPU.
            **hub: ``revision``, ``subfolder``, ``token``, ``cache_dir``, ``local_files_only``, ``force_download``, as
                in `huggingface_hub`.

        Raises:
            SeergateError: if the source is missing or damaged, a tensor is missing, unexpected or of wrong shape, or a
                number overflows in the dtype.
            ValueError: for a dtype that gates cannot have.
        """
        if dtype is not None:
            check_one_of("dtype", dtype, DTYPES)
        source = str(pretrained_model_name_or_path)
        bank = load_gates(cls, source, **hub)
        bank = (bank if dtype is None else bank.cast(dtype)).to(device=device)
        bank.source = source
        return bank

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        """Write the adapter: `gate_config.json`, `gate_model.safetensors`, `README.md`.

        Args:
            save_directory: directory to write to; created if missing. An adapter in it is replaced.

        Raises:
            SeergateError: if the adapter cannot be written.
        """
        save_adapter(self, save_directory)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload the adapter in one commit and return the address of that commit, or of the pull request.

        Args:
            repo_id: ``org/name``, or ``name`` in the user's namespace; created if missing.
            **options: ``private``, ``token``, ``revision``, ``subfolder``, ``commit_message``,
                ``commit_description``, ``create_pr``, ``card``, as in `seergate.gates.push_adapter`.

        Raises:
            SeergateError: if the Hub refuses, with its reason.
        """
        return push_adapter(self, repo_id, **options)

    def distill_loss(
        self,
        model: PreTrainedModel,
        *,
        input_ids: Tensor,
        cu_seqlens: Tensor | None = None,
        row_start: float = 0.5,
        reduction: str = "row_mean",
        target: str = "max",
        target_budget: int | None = None,
        row_stride: int = 1,
        row_shift: int = 0,
    ) -> Tensor:
        """Return the distillation loss of the gates against the model's attention; ``.backward()`` adds gradients.

        The frozen model runs once, without its LM head; the gradients are computed layer by layer in its forward pass.
        Gates of ``trim_kv`` learn from the model's output instead (`distill.losses.retention_loss`): the model runs
        with its LM head, and a second time with an autograd graph.

        Args:
            model: the base model, in eval mode.
            input_ids: ``[1, T]`` or ``[T]``, int32 or int64, a pack of sequences.
            cu_seqlens: int32 ``[n + 1]``, the offset of each sequence, then ``T``; one sequence if ``None``.
            row_start: rows of each sequence before ``int(length * row_start)`` do not count.
            reduction: ``"row_mean"``, the mean over layers of the mean KL in nats per row and KV head, or
                ``"published"``, the weighting of the published code, summed over layers and times 10 (`ops.gate_kl`).
            target: distribution over blocks to learn: ``"max"`` or ``"sum"`` (`ops.scorer_kl`).
            target_budget: for ``trim_kv``, which needs it, the maximum number of tokens of a KV head.
            row_stride, row_shift: count only every ``row_stride``-th of these rows, starting with number
                ``row_shift % row_stride``; a different shift for each pack covers all positions in a block.

        Returns:
            The loss, a scalar.

        Raises:
            SeergateError: if the gates do not fit the model, or it is in training mode.
            ValueError: if an id is not in the vocabulary, or the pack or an option is invalid.
        """
        check_gates(model, self)
        if not isinstance(input_ids, Tensor):
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
        check_recipe(self.config, target, reduction, target_budget, row_stride)
        from seergate.distill.losses.distill_loss import DistillSpec
        from seergate.distill.losses.teacher_forward import distill_steps

        spec = DistillSpec(self, row_start, reduction, (), target, target_budget, row_stride, row_shift)
        return distill_steps([spec], model, input_ids, cu_seqlens)[0].loss
