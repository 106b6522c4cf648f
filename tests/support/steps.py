"""Steps made by hand, for states of methods without a model and a cache."""

from typing import Any

import torch
from torch import Tensor

from seergate.methods.base import LayerSpec, Step


def spec(keys: Tensor, heads: int, rotary: Any = None) -> LayerSpec:
    """Of layer 0, with this many query heads and the shape of ``keys [B, K, T, D]``."""
    return LayerSpec(0, len(keys), heads, keys.shape[1], keys.shape[3], keys.dtype, keys.device, rotary)


def step(
    q: Tensor, keys: Tensor, values: Tensor | None = None, lengths: Any = None, new: int = 1, **options: Any
) -> Step:
    """The newest ``new`` of the tokens ``keys [B, K, T, D]``, of any prefix of a row that ``lengths`` names.

    Args:
        q: their queries ``[B, H, new, D]``, or that of the last ``[B, H, D]``; before RoPE they are the same.
    """
    queries, own_keys = q if q.ndim == 4 else q[:, :, None], keys[:, :, keys.shape[2] - new :]
    ends = lengths or [keys.shape[2]] * len(keys)
    return Step(
        q_pre_BHSD=queries,
        k_pre_BKSD=own_keys,
        q_BHSD=queries,
        k_BKSD=own_keys,
        starts=[end - new for end in ends],
        counts=[new] * len(ends),
        keys_BKCD=keys,
        values_BKCD=keys if values is None else values,
        lengths=torch.tensor(ends),
        **{"sm_scale": 1.0, **options},
    )


def fed(method: Any, q: Tensor, keys: Tensor, chunks: list[int]) -> tuple[Any, Step]:
    """A state that has seen ``keys`` in chunks of these sizes, and the last step, with its queries ``q``."""
    state, end = method.new_state(spec(keys, q.shape[1])), 0
    for size in chunks:
        end += size
        last = step(q, keys[:, :, :end], new=size)
        state.append(last)
    return state, last


def prompted(method: Any, q: Tensor, keys: Tensor) -> tuple[Any, Step]:
    """A state that has seen keys as a prompt, and the step; a single query ``[B, H, 1, D]`` stands for all."""
    return fed(method, q.expand(-1, -1, keys.shape[2], -1), keys, [keys.shape[2]])
