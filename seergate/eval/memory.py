"""How many samples fit into memory: an estimate to start from, and how running out of it is recognised."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch
from transformers import PreTrainedModel

LARGEST_BATCH = 256
USABLE = 0.8
"""Share of the free memory that is planned for. The rest is for activations and for what the estimate leaves out."""

GROWTH = 1.25
"""Buffers are allocated ahead of what they hold."""


def bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of keys and values that one token of context takes, all layers."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * torch.empty(0, dtype=model.dtype).element_size())


def free_bytes(device: torch.device) -> int:
    """Memory that is free now, within the limits of a container."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + reserved)
    free = int(psutil.virtual_memory().available)
    limits = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        limit, used = (path.read_text().strip() for path in limits)
    except OSError:
        return free  # not Linux, or no control groups
    return free if limit == "max" else min(free, int(limit) - int(used))


def estimated_batch(model: PreTrainedModel, longest: int, sharing: int = 1) -> int:
    """How many samples of this many tokens fit, prompt included; at least 1, at most `LARGEST_BATCH`.

    It assumes that all of them grow to the limit, so it is rarely too large; where it is, the engine halves it.

    Args:
        model: loaded.
        longest: tokens of a sample.
        sharing: processes that divide the device's free memory equally, all of which have loaded their models.
    """
    room = USABLE * free_bytes(model.device) / sharing
    return max(1, min(LARGEST_BATCH, int(room / (GROWTH * longest * bytes_per_token(model)))))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, on a GPU or on the CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError) and ("alloc_cpu" in words or "out of memory" in words)
