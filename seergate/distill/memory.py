"""Estimated bytes of a run, from shapes alone. The formulas follow the code; a test holds them to its allocations.

Letters: T tokens of a pack, u bytes per number of the frozen model, h its hidden size, I its MLP's width, H query
heads, K KV heads, D head dimension, E gate dimension.
"""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from seergate.distill.base_model import base_dtype, is_gguf
from seergate.distill.config import TrainConfig
from seergate.distill.engines import bucket_bytes
from seergate.hf.bank import GateBank
from seergate.hf.teacher_forward import tile_rows
from seergate.models.families import decoder_of, text_config
from seergate.ops.torch_impl.teacher import CHUNK_BYTES_CPU, CHUNK_BYTES_DEVICE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FLOAT32 = 4
BYTES_PER_WEIGHT = {"bnb-4bit": 0.5 + 4 / 64, "bnb-8bit": 1.0, "torchao-int8": 1.0}
"""Bytes of a quantised linear layer; nf4 has a float32 scale per 64 weights, the others one per row (not counted)."""

WORKING_BYTES = 150_000_000
"""On a processor, resident memory above the tensors: what the allocator keeps, and libraries while they compute. In a
step of one or two layers of Qwen3-8B's width 0.12 to 0.18 GB, from 2k to 32k tokens (two threads)."""

CONTEXT_BYTES, FRAGMENTS = 1_000_000_000, 0.07
"""Bytes of a GPU's memory for CUDA's context, NCCL and cuBLAS, and the share of it that the allocator cannot use for
the next tensor. Assumed, not measured."""

TILE_COPIES = 7.4
"""Intermediate results of the query branch per output, all in float32: measured, as its autograd graph decides it."""


@dataclass(frozen=True)
class Memory:
    """Bytes per process while a pack is in the works.

    Attributes:
        base: the frozen model on the device, without its LM head. On a processor, weights that need no conversion stay
            memory-mapped (embedding included).
        base_elsewhere: layers of the frozen model in host memory, on disk, or in other processes.
        gathered: layers of a sharded frozen model that are put together: one computes, the next one arrives.
        gradients: accumulated over packs, and of the current pack.
        moments: AdamW's two; with DeepSpeed this process's share, with its own copies of gates and gradients.
        buckets: DeepSpeed's buffer for gradients on their way.
        activations: peak activations of the frozen model, the teacher and the gate of one layer.
        loading: further bytes while the model is loaded: the LM head, and on a processor a file to convert.
    """

    base: int
    base_elsewhere: int
    gathered: int
    gates: int
    gradients: int
    moments: int
    buckets: int
    activations: int
    loading: int

    @property
    def total(self) -> int:
        """On the device: the larger of loading and training."""
        training = self.gathered + self.gates + self.gradients + self.moments + self.buckets + self.activations
        return self.base + max(self.loading, training)


def estimate_memory(
    model: PreTrainedModel, bank: GateBank, config: TrainConfig, device: torch.device, processes: int
) -> Memory:
    """The bytes of a run.

    Args:
        model, bank: the frozen model and its gates, without weights.
        processes: how many share the optimizer's state under DeepSpeed, and a sharded frozen model.
    """
    decoder: Any = decoder_of(model)
    width, layers = base_dtype(config, device).itemsize, [_bytes(layer, config, device) for layer in decoder.layers]
    embedding = width * (_numbers(decoder) - _numbers(decoder.layers))
    base, loading = sum(layers) + embedding, width * (_numbers(model) - _numbers(decoder))
    if config.base_memory_gb is not None:
        loading = 0  # each layer goes to its place as it is read
    elif config.shard_base:
        loading = -(-loading // processes)
    elif device.type == "cpu" and config.quantize == "none":
        source = next(model.parameters()).dtype
        if source == base_dtype(config, device):
            base, loading = base - embedding, 0
        else:
            loading += source.itemsize * _numbers(model)
    here, gathered = base, 0
    if config.base_memory_gb is not None:
        here = min(base, int(config.base_memory_gb * 1e9))
    if config.shard_base:
        here = -(-base // processes)
        tied = text_config(model).tie_word_embeddings  # then the embedding stays together, for a head that never runs
        gathered = embedding + 2 * max(layers) if tied else max(embedding, 2 * max(layers))
    gates = FLOAT32 * sum(p.numel() for p in bank.parameters())
    shared = 4 * gates // processes if config.deepspeed else 2 * gates
    return Memory(
        base=here,
        base_elsewhere=base - here,
        gathered=gathered,
        gates=gates,
        gradients=2 * gates,
        moments=shared,
        buckets=bucket_bytes(config, processes),
        activations=activation_bytes(model, bank, config, device)
        + (max(layers) if config.base_memory_gb is not None and here < base else 0),
        loading=loading,
    )


def decide_sharding(
    model: PreTrainedModel, bank: GateBank, config: TrainConfig, device: torch.device, processes: int, room: int
) -> TrainConfig:
    """The run with ``shard_base`` decided where it is left open: true if a copy for each process, with ``room`` bytes,
    does not fit. The other arguments are those of `estimate_memory`.
    """
    if config.shard_base is not None:
        return config
    copies = replace(config, shard_base=False)
    if processes == 1 or config.base_memory_gb is not None or config.quantize != "none" or is_gguf(config):
        return copies
    fits = estimate_memory(model, bank, copies, device, processes).total <= room
    return copies if fits else replace(config, shard_base=True)


def capacity(device: torch.device, processes: int) -> int:
    """Bytes for each process; those on a processor share its memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) // processes


def overhead(device: torch.device, memory: int) -> int:
    """Bytes of a device's memory that are not for tensors: assumed on a GPU; on a processor those of Python and the
    libraries of training, which are nearly all that this process has held so far.
    """
    if device.type != "cpu":
        return CONTEXT_BYTES + int(FRAGMENTS * memory)
    import datasets
    import torch.utils.tensorboard  # noqa: F401

    assert datasets
    return peak_bytes(device) + WORKING_BYTES


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has held so far: on a GPU, or resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, kilobytes elsewhere


def activation_bytes(model: PreTrainedModel, bank: GateBank, config: TrainConfig, device: torch.device) -> int:
    """The most that the forward holds at once, beside weights: in the gate's loss, attention or MLP of a layer."""
    base, geometry, u = text_config(model), bank.geometry, base_dtype(config, device).itemsize
    h, tokens = base.hidden_size, config.max_length
    counted = tokens - int(tokens * config.row_start)
    tile = min(tile_rows(device), counted)
    queries, keys = geometry.num_heads * geometry.head_dim, geometry.num_kv_heads * geometry.head_dim
    gate = geometry.num_kv_heads * bank.config.gate_dim * FLOAT32
    streams = 3 if base.num_hidden_layers > 1 else 2  # embeddings, the layer's input, what the norm makes of it
    rope = 2 * geometry.head_dim * u
    # q and k before and after RoPE, v
    inputs = tokens * ((streams * h + 2 * queries + 3 * keys) * u + rope)
    # the gate's queries and their gradient; at one time a tile of the query branch, at another a chunk of scores
    chunk = CHUNK_BYTES_CPU if device.type == "cpu" else CHUNK_BYTES_DEVICE
    # what attention returned: the output, and what the loss needs of it
    held = tokens * (queries * u + geometry.num_heads * FLOAT32)
    branch = int(tile * (queries * (u + FLOAT32) + TILE_COPIES * gate))
    # the only tile of the query branch keeps what its gradients need
    gate_loss = inputs + held + 2 * tokens * gate + (branch + chunk if tile == counted else max(branch, chunk))
    # what attention returns, and where the pack's sequences are put together
    attention = inputs + 2 * tokens * queries * u
    # the two inputs of the MLP's product and the product itself; in a mixture, those of each chosen expert, and what
    # goes into it and comes out of it
    chosen = getattr(base, "num_experts_per_tok", None) or 0
    width = (getattr(base, "moe_intermediate_size", None) or base.intermediate_size) * max(1, chosen)
    mlp = tokens * (((streams + 1 + 2 * chosen) * h + 3 * width) * u + rope)
    return max(gate_loss, attention, mlp)


def _numbers(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _bytes(layer: nn.Module, config: TrainConfig, device: torch.device) -> int:
    """A layer's weights; quantisers pack its linear maps."""
    width = base_dtype(config, device).itemsize
    linear = sum(m.weight.numel() for m in layer.modules() if isinstance(m, nn.Linear))
    return int(BYTES_PER_WEIGHT.get(config.quantize, width) * linear + width * (_numbers(layer) - linear))
