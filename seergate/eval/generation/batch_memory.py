"""Memory estimates for batches of samples, and detection of out-of-memory errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from seergate.cache.layer import GatedLayer
from seergate.errors import SeergateError
from seergate.eval.generation.batch import Batch
from seergate.methods.evicting import CompressingState
from seergate.resources import free_memory

LARGEST_BATCH = 256
USABLE = 0.8
"""Share of the free memory that samples may take. The rest is for activations and other uses."""

GROWTH = 1.25
"""Ratio of allocated to used bytes of buffers, which grow in steps."""


def free_bytes(device: torch.device) -> int:
    """Bytes of memory that are free now, within the limits of a container."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + reserved)
    return free_memory()


@torch.inference_mode()
def sample_bytes(model: PreTrainedModel, prompt: Sequence[int], longest: int) -> float:
    """Estimated peak bytes of a sample of ``longest`` tokens under the attached method: keys, values and the method's
    state, extrapolated from a prefill of ``prompt``.
    """
    batch, total = Batch(model), 0.0
    batch.add([prompt])
    for layer in batch.cache.layers:
        if not isinstance(layer, GatedLayer) or layer.state is None:
            # linear attention has no keys but states, and a layer that reads another's keys has neither
            keys = [getattr(layer, name, None) for name in ("keys", "values")]
            states = [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
            for tensors, times in ((keys, longest / len(prompt)), (states, 1)):
                total += times * sum(tensor.nbytes for tensor in tensors if tensor is not None)
            continue
        state, resident = layer.state, longest
        if isinstance(state, CompressingState) and not state.compresses_once:
            for part in (state, *state.parts):
                if isinstance(part, CompressingState):
                    part.decoded = [longest - len(prompt)]  # as at the end: some states grow
            resident = max(len(prompt), min(longest, state.max_resident()))
        total += float(layer.storage.row_bytes([resident])[0] + state.bytes_held(resident, longest))
    return total


def estimated_batch(device: torch.device, each: float, sharing: int = 1) -> int:
    """Number of samples of this size (`sample_bytes`) that fit; in 1..`LARGEST_BATCH`. All samples are assumed
    to grow to the limit, so the estimate is rarely too large; if it is, the engine halves it.
    """
    return max(1, min(LARGEST_BATCH, int(USABLE * free_bytes(device) / sharing / (GROWTH * each))))


def is_out_of_memory(error: BaseException) -> bool:
    """True if an exception means that memory ran out, on a GPU or on the CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError) and ("alloc_cpu" in words or "out of memory" in words)


@contextmanager
def needing_memory(what: str) -> Iterator[None]:
    """Report that memory ran out while ``what`` as a `SeergateError`, where a smaller batch would not help."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise SeergateError(f"memory ran out while {what}: {error}") from error
        raise
