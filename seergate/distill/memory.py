"""Estimates a run's memory in bytes from shapes alone. A test compares the formulas with the code's allocations."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from seergate.distill.base_model import base_dtype, is_divisible, own_format
from seergate.distill.config import TrainConfig
from seergate.distill.engines import bucket_bytes
from seergate.distill.losses.block_loss import tile_rows
from seergate.models.families import decoder_of, text_config
from seergate.models.gate_bank import GateBank
from seergate.ops.torch_impl.teacher import CHUNK_BYTES_CPU, CHUNK_BYTES_DEVICE
from seergate.paths import gguf_file
from seergate.resources import container_limit

FLOAT32 = 4
BYTES_PER_WEIGHT = {"bnb-4bit": 0.5 + 4 / 64, "bnb-8bit": 1.0, "torchao-int8": 1.0}
"""Bytes per weight of quantised linear layers; nf4 has a float32 scale per 64 weights (other scales: not counted)."""

WORKING_BYTES = 150_000_000
"""Resident memory on a CPU beyond the tensors: held by the allocator, and used by libraries while they compute. In a
step of one or two layers of Qwen3-8B's width: 0.12 to 0.18 GB, from 2k to 32k tokens (two threads)."""

CONTEXT_BYTES, FRAGMENTS = 1_000_000_000, 0.07
"""GPU memory for CUDA's context, NCCL and cuBLAS in bytes, and the share of GPU memory that is lost to fragmentation.
Both are assumed, not measured."""

TILE_COPIES = 7.4
"""Size of the query branch's intermediate results relative to its output, in float32 (measured)."""


@dataclass(frozen=True)
class Memory:
    """Memory per process during a step, in bytes.

    Attributes:
        base: the frozen model on the device, without its LM head. On a CPU, weights that need no conversion stay
            memory-mapped, and the embedding is not counted.
        base_elsewhere: layers of the frozen model in host memory, on disk, or in other processes.
        gathered: gathered layers of a sharded frozen model: the current layer and the next one.
        gradients: gradients accumulated over packs, and those of the current pack.
        moments: AdamW's two moments; with DeepSpeed, this process's shard and its copies of gates and gradients.
        buckets: DeepSpeed's buffer for reducing gradients.
        activations: peak activations of the frozen model, the teacher and the gate of one layer.
        loading: additional memory while the model is loaded: the LM head, and on a CPU a file to convert.
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
        """Peak memory on the device: the larger of loading and training."""
        training = self.gathered + self.gates + self.gradients + self.moments + self.buckets + self.activations
        return self.base + max(self.loading, training)


def estimate_memory(
    model: PreTrainedModel, bank: GateBank, config: TrainConfig, device: torch.device, processes: int
) -> Memory:
    """Estimate the memory of a run.

    Args:
        model, bank: the frozen model and its gates, without weights.
        processes: number of processes that share DeepSpeed's optimizer state and a sharded frozen model.
    """
    decoder: Any = decoder_of(model)
    width, layers = base_dtype(config, device).itemsize, [_bytes(x, model, config, device) for x in decoder.layers]
    embedding = width * (_numbers(decoder) - _numbers(decoder.layers))
    base, loading = sum(layers) + embedding, width * (_numbers(model) - _numbers(decoder))
    if config.base_memory_gb is not None:
        loading = 0  # each layer is read directly to its device
    elif config.shard_base:
        loading = -(-loading // processes)
    elif device.type == "cpu" and config.quantize == "none" and own_format(model.config) is None:
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
        tied = text_config(model).tie_word_embeddings  # a tied embedding stays gathered
        gathered = embedding + 2 * max(layers) if tied else max(embedding, 2 * max(layers))
    gates = FLOAT32 * bank.num_parameters
    return Memory(
        base=here,
        base_elsewhere=base - here,
        gathered=gathered,
        gates=gates,
        gradients=2 * gates,
        moments=4 * gates // processes if config.deepspeed else 2 * gates,
        buckets=bucket_bytes(config, processes),
        activations=activation_bytes(model, bank, config, device)
        + (max(layers) if config.base_memory_gb is not None and here < base else 0),
        loading=loading,
    )


def decide_sharding(
    model: PreTrainedModel, bank: GateBank, config: TrainConfig, device: torch.device, processes: int, room: int
) -> TrainConfig:
    """Set ``shard_base`` if it is ``None``: true if a full copy of the frozen model does not fit in the ``room`` bytes
    of each process. The other arguments are those of `estimate_memory`.
    """
    if config.shard_base is not None:
        return config
    copies = replace(config, shard_base=False)
    whole = gguf_file(config.model) or not is_divisible(model.config)  # each process reads such a file in full
    if processes == 1 or config.base_memory_gb is not None or config.quantize != "none" or whole:
        return copies
    fits = estimate_memory(model, bank, copies, device, processes).total <= room
    return copies if fits else replace(config, shard_base=True)


def capacity(device: torch.device, processes: int) -> int:
    """Return the memory of each process in bytes; processes on a CPU share the memory of the host or container."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    total = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(total, container_limit() or total) // processes


def overhead(device: torch.device, memory: int) -> int:
    """Return the bytes of a device's memory that are not available for tensors. On a GPU, they are assumed; on a CPU,
    they are this process's peak so far (Python and the training libraries) plus `WORKING_BYTES`.
    """
    if device.type != "cpu":
        return CONTEXT_BYTES + int(FRAGMENTS * memory)
    import datasets  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401

    return peak_bytes(device) + WORKING_BYTES


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of this process so far in bytes: of tensors on a GPU, or else resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, kilobytes elsewhere


def activation_bytes(model: PreTrainedModel, bank: GateBank, config: TrainConfig, device: torch.device) -> int:
    """Return the peak activations of a layer's forward pass in bytes: in the gate's loss, attention or MLP."""
    base, geometry, itemsize = text_config(model), bank.geometry, base_dtype(config, device).itemsize
    hidden, tokens = base.hidden_size, config.max_length
    counted = tokens - int(tokens * config.row_start)
    tile = min(tile_rows(device), counted)
    queries, keys = geometry.num_heads * geometry.head_dim, geometry.num_kv_heads * geometry.head_dim
    gate = geometry.num_kv_heads * bank.config.gate_dim * FLOAT32
    streams = 3 if base.num_hidden_layers > 1 else 2  # embeddings, the layer's input and its norm's output
    rope = 2 * geometry.head_dim * itemsize
    # q and k before and after RoPE, v
    inputs = tokens * ((streams * hidden + 2 * queries + 3 * keys) * itemsize + rope)
    # a chunk of the teacher's scores; it is not held at the same time as a recomputed tile of the query branch
    chunk = CHUNK_BYTES_CPU if device.type == "cpu" else CHUNK_BYTES_DEVICE
    # the attention's output and its log-sum-exp, which the loss needs
    stored = tokens * (queries * itemsize + geometry.num_heads * FLOAT32)
    branch = int(tile * (queries * (itemsize + FLOAT32) + TILE_COPIES * gate))
    # the gate's queries and their gradient; a single tile of the query branch keeps its autograd graph
    gate_loss = inputs + stored + 2 * tokens * gate + (branch + chunk if tile == counted else max(branch, chunk))
    # the attention's output, and the buffer in which the outputs of the pack's sequences are joined
    attention = inputs + 2 * tokens * queries * itemsize
    # the two factors of the gated MLP and their product; in a mixture of experts, those of each chosen expert, with
    # the expert's input and output
    chosen = getattr(base, "num_experts_per_tok", None) or 0
    width = (getattr(base, "moe_intermediate_size", None) or base.intermediate_size) * max(1, chosen)
    mlp = tokens * (((streams + 1 + 2 * chosen) * hidden + 3 * width) * itemsize + rope)
    return max(gate_loss, attention, mlp)


def _numbers(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _bytes(layer: nn.Module, model: PreTrainedModel, config: TrainConfig, device: torch.device) -> int:
    """Return the bytes of a layer's weights; quantisation applies to its linear layers only. Quantised checkpoints
    have an eighth more for scales, as nf4.
    """
    width, own = base_dtype(config, device).itemsize, own_format(model.config)
    each = BYTES_PER_WEIGHT.get(config.quantize, own[1] * 1.125 / 8 if own and own[1] else width)
    linear = sum(m.weight.numel() for m in layer.modules() if isinstance(m, nn.Linear))
    return int(each * linear + width * (_numbers(layer) - linear))
