"""Dense decode attention of other libraries: the baselines of the sparse kernel.

Each takes ``q [B, H, d]`` and a full cache ``k, v [B, Hkv, S, d]`` and returns a call that gives ``[B, H, d]``. Which
of them work depends on the machine; `available` gives the reason for each that does not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from seergate import ops

Attention = Callable[[Tensor, Tensor, Tensor], Callable[[], Tensor]]


def sdpa_stock(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """The call that transformers makes: one query per head."""
    return lambda: F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]


def sdpa_packed(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """SDPA with the group as query axis, so that keys and values are read once."""
    q = q.unflatten(1, (k.shape[1], -1))
    return lambda: F.scaled_dot_product_attention(q, k, v).flatten(1, 2)


def packed_with(backend: SDPBackend) -> Attention:
    """`sdpa_packed`, restricted to one of PyTorch's backends."""

    def build(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        run = sdpa_packed(q, k, v)

        def call() -> Tensor:
            with sdpa_kernel(backend):
                return run()

        return call

    return build


def seergate_dense(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """seergate's dense kernel, which splits the cache like the sparse kernel."""
    return lambda: ops.dense_decode(q, k, v)


def flex(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """Compiled FlexAttention."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]


def flash_attn(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """flash-attn's decode call; its cache is ``[B, S, Hkv, d]``, as in a model that uses it."""
    package = importlib.import_module("flash_attn")
    k, v = (x.transpose(1, 2).contiguous() for x in (k, v))
    return lambda: package.flash_attn_with_kvcache(q[:, None], k, v)[:, 0]


def flashinfer(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """FlashInfer's batch decode on pages of 64 tokens, planned once."""
    package = importlib.import_module("flashinfer")
    (batch, heads, dim), (kv_heads, length), page = q.shape, k.shape[1:3], 64
    if length % page:
        raise ValueError("its pages hold 64 tokens")
    cache = tuple(
        x.unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1).contiguous() for x in (k, v)
    )  # [pages, Hkv, page, d]
    each = length // page
    ends = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * each
    pages = torch.arange(batch * each, dtype=torch.int32, device=q.device)
    filled = torch.full((batch,), page, dtype=torch.int32, device=q.device)
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=q.device)
    wrapper = package.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    wrapper.plan(ends, pages, filled, heads, kv_heads, dim, page, q_data_type=q.dtype, kv_data_type=k.dtype)
    return lambda: wrapper.run(q, cache)


ON_CPU: dict[str, Attention] = {"sdpa_stock": sdpa_stock, "sdpa_packed": sdpa_packed, "seergate_dense": seergate_dense}
ON_GPU: dict[str, Attention] = ON_CPU | {
    "sdpa_flash": packed_with(SDPBackend.FLASH_ATTENTION),
    "sdpa_cudnn": packed_with(SDPBackend.CUDNN_ATTENTION),
    "sdpa_efficient": packed_with(SDPBackend.EFFICIENT_ATTENTION),
    "flex": flex,
    "flash_attn": flash_attn,
    "flashinfer": flashinfer,
}


def first_line_of(problem: Exception) -> str:
    """Class and first line of an error."""
    return f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"


def available(q: Tensor, k: Tensor, v: Tensor, tolerance: float) -> tuple[dict[str, Attention], dict[str, str]]:
    """The baselines that run here and are right on these tensors, and the reason for leaving out each other."""
    q64 = q.double().unflatten(1, (k.shape[1], -1))
    want = F.scaled_dot_product_attention(q64, k.double(), v.double()).flatten(1, 2)
    usable, left_out = {}, {}
    for name, build in (ON_GPU if q.device.type == "cuda" else ON_CPU).items():
        try:
            error = float((build(q, k, v)().double() - want).norm() / want.norm())
        except Exception as problem:  # any error of a third-party package on this machine
            left_out[name] = first_line_of(problem)
            continue
        if error < tolerance:
            usable[name] = build
        else:
            left_out[name] = f"relative error {error:.1e}"
    return usable, left_out
