"""vLLM's workers, extended to add gates to the model. vLLM finds these classes by name (`parallel_config`)."""

from __future__ import annotations

import time
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from seergate.errors import SeergateError
from seergate.gates.scorer import Scorer
from seergate.methods import SelectingMethod
from seergate.models.loading import skeleton
from seergate.serving.common.checks import rope_kinds
from seergate.serving.common.rope import Unrotation
from seergate.serving.common.scoring import Scores
from seergate.serving.common.settings import Settings
from seergate.serving.common.statistics import statistics
from seergate.serving.vllm.attention import Counts, sparse_backend, sparse_layer, with_pages_of_16
from seergate.serving.vllm.checks import READABLE, WORKERS
from seergate.serving.vllm.pages import PAGES


class Gated:
    """Mixin for vLLM's workers."""

    gated: dict[int, Any]
    logged = 0.0, 0, 0  # time of the last log line, tokens read and held by then

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model as vLLM does, then make its layers sparse."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        self.gated = attach(self.model_runner.model, self.vllm_config)  # type: ignore[attr-defined]

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step; at vLLM's interval for statistics, log the share of cached tokens that decoding reads."""
        from vllm import envs
        from vllm.logger import init_logger

        output = super().execute_model(*args, **kwargs)  # type: ignore[misc]
        then, read_tokens, held_tokens = self.logged
        if (now := time.monotonic()) - then >= envs.VLLM_LOG_STATS_INTERVAL:
            total = [sum(numbers) for numbers in zip(*self._counts(), strict=True)] or [0, 0]
            if total[1] > held_tokens:
                share = (total[0] - read_tokens) / (total[1] - held_tokens)
                init_logger("vllm.seergate").info("seergate: decoding reads %.1f%% of the cached tokens", 100 * share)
            self.logged = now, total[0], total[1]
        return output

    def seergate_stats(self) -> dict[str, Any]:
        """The `statistics` of this rank; ``llm.collective_rpc("seergate_stats")`` returns those of all ranks."""
        nbytes = sum(len(attention.kv_cache) * attention.impl.room for attention in self.gated.values())
        return statistics(zip(self.gated, self._counts(), strict=True), nbytes)

    def _counts(self) -> list[list[int]]:
        """Tokens read and held in each layer, in one copy from the device."""
        counts = [attention.impl.counts for attention in self.gated.values()]
        pairs = [torch.stack((each.read, each.held)) for each in counts]
        return torch.stack(pairs).tolist() if pairs else []


def attach(model: nn.Module, vllm_config: Any) -> dict[int, Any]:
    """Make the layers of this rank's model sparse, and return layer -> vLLM's attention module."""
    from vllm.logger import init_logger
    from vllm.model_executor.layers.attention import Attention
    from vllm.platforms import current_platform

    settings = Settings.read(vllm_config.additional_config)
    assert settings is not None
    bank, device = settings.bank(), next(model.parameters()).device
    method = settings.selector(bank, vllm_config.cache_config.block_size)
    assert method.serving_scores is not None
    scores: type[Scores] = resolve_name(method.serving_scores)
    kinds = rope_kinds(skeleton(vllm_config.model_config.hf_config))
    frequencies: Tensor | None = None
    attentions: dict[int, Any] = {}
    if current_platform.is_cpu() and vllm_config.cache_config.block_size % 32:
        for module in vllm_config.compilation_config.static_forward_context.values():  # a draft model's too
            if isinstance(module, Attention):
                module.attn_backend = with_pages_of_16(module.attn_backend)
    for layer, parent, attention in attention_layers(model):
        if layer not in kinds or not method.selects_in(layer):
            continue
        if (anchor := method.anchor_of(layer)) in attentions:
            scoring = attentions[anchor].impl.scoring
        else:
            gate = unrotate = None
            dtype = attention.kv_cache_torch_dtype
            if bank is not None:
                unrotate = Unrotation(parent.rotary_emb if kinds[layer] == "plain" else None)
                gate = rank_gate(bank.gate(layer), attention.num_kv_heads, device, dtype)
                frequencies = gate.inv_freq if frequencies is None else frequencies
                gate.inv_freq = frequencies  # one tensor, so that layers share its angles
            impl = attention.impl
            scoring = scores(method, attention.head_size, dtype, impl.scale, impl.logits_soft_cap, gate, unrotate)
        counts = Counts(*torch.zeros(2, dtype=torch.long, device=device))
        make_sparse(attention, method, scoring, counts)
        attentions[layer] = attention
        attention.impl.anchor = attentions[anchor].impl
    init_logger("vllm.seergate").info("%s", settings.said(method, len(attentions)))
    return attentions


def attention_layers(model: nn.Module) -> list[tuple[int, Any, Any]]:
    """For every decoder layer on this rank: its number, the module with its RoPE, and vLLM's attention module."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models.utils import extract_layer_index

    return [
        (extract_layer_index(child.layer_name), parent, child)
        for parent in model.modules()
        for child in parent.children()
        if isinstance(child, Attention)
    ]


def make_sparse(attention: Any, method: SelectingMethod, scoring: Scores, counts: Counts) -> None:
    """Replace the attention that vLLM chose for a layer by its sparse subclass."""
    if attention.attn_backend.get_name() not in PAGES:
        raise SeergateError(
            f"vLLM's attention backend is {attention.attn_backend.get_name()}; with seergate it must be one of "
            f"{', '.join(PAGES)}"
        )
    if attention.kv_cache_dtype not in READABLE:  # a checkpoint may set it without any configuration option
        raise SeergateError(f"the model's kv_cache_dtype is {attention.kv_cache_dtype}; it must be one of {READABLE}")
    attention.attn_backend = sparse_backend(attention.attn_backend)
    kind = attention.attn_backend.get_impl_cls()
    impl = kind.__new__(kind)
    own = {"method": method, "scoring": scoring, "counts": counts, "pages": WeakTensorKeyDictionary()}
    vars(impl).update(vars(attention.impl), **own)
    stock: Any = type(attention)
    attention.impl, attention.__class__ = impl, sparse_layer(stock)


def rank_gate(gate: Scorer, kv_heads: int, device: torch.device, dtype: torch.dtype) -> Scorer:
    """The part of a layer's gate that belongs to this rank's KV heads, in the dtype of the cache."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    first = rank * gate.num_kv_heads // ranks
    share = replace(gate.geometry, num_heads=kv_heads * gate.group_size, num_kv_heads=kv_heads)
    part = type(gate)(gate.config, share).to(device, dtype)
    part.load_state_dict(
        {
            name: tensor[first : first + kv_heads] if name in ("q_proj.weight", "k_proj.weight") else tensor
            for name, tensor in gate.state_dict().items()
        }
    )
    return part.requires_grad_(False)


def __getattr__(name: str) -> Any:
    """Create `CPUWorker` or `GPUWorker` on first access, as vLLM's module of the other may not be importable here."""
    for stock, ours in WORKERS.items():
        if ours == f"{__name__}.{name}":
            stock_class = resolve_name(":".join(stock.rsplit(".", 1)))  # the colon: an import that fails is not hidden
            globals()[name] = made = type(name, (Gated, stock_class), {"__module__": __name__})
            return made
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
