"""Measures the context length above which sparse decode steps are faster than dense ones (``dense_below``).

A dense and a sparse step of one layer are timed on random keys and values at lengths that double.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from seergate import ops
from seergate.hf.call import layer_spec
from seergate.methods.base import LayerSpec, Step
from seergate.methods.selecting import SelectingMethod, SelectingState
from seergate.models import families

MOST_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}
"""Total bytes of the copies of keys and values, which are read in turn so that short ones leave the CPU cache."""
SECONDS, ROUNDS = 0.2, 25
"""Limits of the measurement at one length: time in seconds (at least three rounds are run), and number of rounds."""

Times = Sequence[tuple[int, float, float]]
"""(length in tokens, seconds of a dense step, seconds of a sparse step), in ascending order of length."""


def break_even(times: Times) -> int:
    """Return the longest context in tokens at which a dense step is faster; 0 if there is none. The times are linearly
    interpolated after the longest measured length at which dense is faster; they are not extrapolated.
    """
    lost = [i for i, (_, dense, sparse) in enumerate(times) if sparse >= dense]
    if not lost:
        return 0
    length, dense, sparse = times[lost[-1]]
    if lost[-1] == len(times) - 1:
        return length
    longer, its_dense, its_sparse = times[lost[-1] + 1]
    loss, gain = sparse - dense, its_dense - its_sparse
    return length + int((longer - length) * loss / (loss + gain))


@torch.no_grad()
def layer_times(model: PreTrainedModel, method: SelectingMethod) -> Times:
    """Time decode steps of one row in the first layer in which the method selects; empty if it selects in none.

    Lengths start at 5/4 of the longest row that the budget covers, double, and end at the model's maximum context or
    at `MOST_BYTES`. A sparse step is scoring, selection and attention; work that dense steps share is left out.
    """
    for layer, attention in families.full_attention_modules(model):
        spec = layer_spec(model, layer, attention)
        if method.selects_in(layer) and isinstance(method.new_state(spec), SelectingState):
            break
    else:
        return []
    size, heads, dim, device = method.block_size, spec.num_kv_heads, spec.head_dim, spec.device
    options = {
        "sm_scale": dim**-0.5,
        "sinks": getattr(attention, "sinks", None),
        "softcap": getattr(attention, "attn_logit_softcapping", None),
    }
    longest = int(getattr(families.text_config(model), "max_position_embeddings", 1 << 20))
    first = (method.covered_tokens * 5 // 4 // size + 1) * size
    room = MOST_BYTES["cuda" if device.type == "cuda" else "cpu"] // (2 * heads * dim * spec.dtype.itemsize)
    most = min(longest, max(room, 2 * first)) // size * size
    if most < first:
        return []
    lengths = [first << i for i in range(40) if first << i < most]
    chance = torch.Generator(device).manual_seed(0)  # leaves the caller's random state unchanged
    some = torch.randn(2, 1 << 16, generator=chance, device=device).to(spec.dtype)
    pool = some.repeat(1, -(-most * heads * dim // some.shape[1]))
    q = torch.randn(1, spec.num_heads, 1, dim, generator=chance, device=device).to(spec.dtype)
    times = []
    for length in [*lengths, most]:
        copies = most // length
        keys, values = pool[:, : copies * heads * length * dim].view(2, copies, 1, heads, length, dim)
        times.append((length, *_medians(method, spec, q, keys, values, options)))
    return times


def _medians(
    method: SelectingMethod, spec: LayerSpec, q: Tensor, keys: Tensor, values: Tensor, options: dict[str, Any]
) -> tuple[float, float]:
    """Median seconds of a dense and a sparse step, run alternately on ``keys``, ``values [copies, 1, K, S, D]``."""
    copies, length, state = len(keys), keys.shape[3], method.new_state(spec)
    assert isinstance(state, SelectingState)
    for start, end in ((0, length - 1), (length - 1, length)):
        queries, new, ends = q.expand(-1, -1, end - start, -1), keys[0][:, :, start:end], torch.tensor([end])
        facts = queries, new, queries, new, [start], [end - start], keys[0], values[0], ends.to(spec.device)
        step = Step(*facts, **options)
        state.append(step)

    def dense(copy: int) -> None:
        ops.dense_decode(q[:, :, 0], keys[copy], values[copy], **options)

    def sparse(copy: int) -> None:
        chosen = method.select(state, step)
        assert chosen is not None
        at = chosen.indices, step.lengths, method.block_size
        ops.sparse_decode(q[:, :, 0], keys[copy], values[copy], *at, **options)

    spent: tuple[list[float], list[float]] = [], []
    dense(0)
    sparse(0)
    began = time.perf_counter()
    for turn in range(ROUNDS):
        if turn >= 3 and time.perf_counter() - began > SECONDS:
            break
        spent[0].append(timed(partial(dense, turn % copies), spec.device))
        spent[1].append(timed(partial(sparse, (turn + copies // 2) % copies), spec.device))
    return statistics.median(spent[0]), statistics.median(spent[1])


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call, including the work that it launches on a GPU."""
    wait = torch.cuda.synchronize if device.type == "cuda" else int
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start
