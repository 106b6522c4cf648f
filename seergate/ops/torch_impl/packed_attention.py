"""`packed_attention` by PyTorch's fused kernels, which return the log-sum-exp along with the output.

A sink is one more term of the softmax's denominator, so it is applied by scaling a kernel's output. With a softcap, or
a window where `varlen` does not run, scores are computed for a chunk of rows at a time.

Shape suffixes: T packed tokens, B = 1, S tokens of a segment, H query heads, K KV heads, D head dimension.
"""

from __future__ import annotations

from functools import cache, partial
from itertools import pairwise

import torch
from torch import Tensor

from seergate.inference_mode import without_gradients
from seergate.ops.attention import Pack, PackedAttention
from seergate.ops.host_memory import copied
from seergate.ops.torch_impl.teacher import compute_dtype, segments

CHUNK_BYTES = 64 * 2**20
"""Size of the score matrix of a chunk of rows."""

VARLEN_DTYPES = (torch.float16, torch.bfloat16)
VARLEN_DIM = 256
"""Largest head dimension of PyTorch's FlashAttention, which needs compute capability 8.0 and multiples of 8."""


@without_gradients
def packed_attention(pack: Pack, v: Tensor, window: int | None) -> PackedAttention:
    """The op on checked arguments."""
    spans, sinks = segments(pack.cu_seqlens), pack.sinks
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (pack.q, pack.k, v))
    window = in_use(window, spans)
    kernel = fused_kernel(q.device, q.dtype, q.shape[-1], v.shape[-1], window=window, softcap=pack.softcap)
    out_THD, lse_TH = by_kernel(kernel, pack._replace(q=q, k=k), v, spans, window)
    if sinks is not None:
        whole_TH = torch.logaddexp(lse_TH, sinks.to(lse_TH.dtype))
        out_THD.mul_((lse_TH - whole_TH).exp_()[..., None])
        lse_TH = whole_TH
    return PackedAttention(out_THD, lse_TH)


def by_kernel(
    kernel: str | None, pack: Pack, v: Tensor, spans: list[tuple[int, int]], window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp without sinks, by a kernel of `fused_kernel`."""
    q, k, cu_seqlens, sm_scale, _, softcap = pack
    if kernel == "varlen":
        return varlen(q, k, v, cu_seqlens, sm_scale, window)
    out_THD = v.new_empty(*q.shape[:2], v.shape[-1])
    lse_TH = q.new_empty(q.shape[:2], dtype=compute_dtype(q))
    rest = partial(chunked, window=window, softcap=softcap)
    attend = {"cpu": flash_on_cpu, "efficient": efficient}.get(kernel or "", rest)
    for start, end in spans:
        if end > start:
            q_BHSD, k_BKSD, v_BKSD = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
            out_BHSD, lse_BHS = attend(q_BHSD, k_BKSD, v_BKSD, sm_scale)
            out_THD[start:end], lse_TH[start:end] = out_BHSD[0].transpose(0, 1), lse_BHS[0].T
    return out_THD, lse_TH


@cache
def gives_lse(kernel: str, device: torch.device) -> bool:
    """True if this PyTorch has the kernel with the expected arguments and log-sum-exp, whose shape differs by
    release. On a GPU the first call waits for the device.
    """
    dtype, borders = torch.float32 if device.type == "cpu" else torch.bfloat16, [0, 40, 64]
    q_THD = torch.arange(64 * 4 * 16, dtype=torch.float32, device=device).sin().view(64, 4, 16).to(dtype)
    pack = Pack(q_THD, q_THD[:, 2:], torch.tensor(borders, dtype=torch.int32, device="cpu"), 0.25)
    rest = pack, pack.k, list(pairwise(borders))
    try:
        results = by_kernel(kernel, *rest)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return all(
        got.shape == want.shape and torch.allclose(got.float(), want.float(), atol=0.05)
        for got, want in zip(results, by_kernel(None, *rest), strict=True)
    )


def in_use(window: int | None, spans: list[tuple[int, int]]) -> int | None:
    """The window, or ``None`` if no segment is longer than it."""
    return window if window is not None and any(end - start > window for start, end in spans) else None


def fused_kernel(
    device: torch.device, dtype: torch.dtype, dim: int, v_dim: int, *, window: int | None, softcap: float | None
) -> str | None:
    """PyTorch's kernel that returns the log-sum-exp for these arguments: ``"varlen"``, ``"efficient"``, ``"cpu"`` or
    ``None``. Kernels that `torch.nn.attention.sdpa_kernel` has disabled are not used.
    """
    flash = torch.backends.cuda.flash_sdp_enabled()  # the switch covers CPUs too
    if softcap is not None:
        return None
    if device.type == "cpu":
        return "cpu" if window is None and flash and dim == v_dim and gives_lse("cpu", device) else None
    if device.type != "cuda" or torch.version.hip is not None or dim % 8 or v_dim % 8:
        return None  # on AMD the log-sum-exp has another layout
    fits = dtype in VARLEN_DTYPES and dim == v_dim <= VARLEN_DIM
    fits = fits and flash and torch.backends.cuda.is_flash_attention_available() and capability(device) >= (8, 0)
    if fits and gives_lse("varlen", device):
        return "varlen"
    efficient_too = window is None and torch.backends.cuda.mem_efficient_sdp_enabled()
    knows = dtype in (torch.float16, torch.float32) or (dtype == torch.bfloat16 and capability(device) >= (8, 0))
    return "efficient" if efficient_too and knows else None


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)


def varlen(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens: Tensor, sm_scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """All segments at once, by the kernel behind `torch.nn.attention.varlen`; its arguments differ by release.

    Returns:
        ``[T, H, D]`` and ``[T, H]``.
    """
    longest = int(cu_seqlens.diff().max())
    borders = copied(cu_seqlens.int(), q_THD.device)
    out_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
        q_THD, k_TKD, v_TKD, borders, borders, longest, longest, 0.0, window is None, False, scale=sm_scale,
        window_size_left=-1 if window is None else window - 1, window_size_right=0,
    )  # fmt: skip
    return out_THD, lse_HT.T


def efficient(q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, sm_scale: float) -> tuple[Tensor, Tensor]:
    """One segment, for GPUs and dtypes without FlashAttention. Cuts off the kernel's padding of the log-sum-exp."""
    group = q_BHSD.shape[1] // k_BKSD.shape[1]
    k_BHSD, v_BHSD = (x.repeat_interleave(group, dim=1) for x in (k_BKSD, v_BKSD))
    out_BHSD, lse_BHX, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q_BHSD, k_BHSD, v_BHSD, None, True, 0.0, True, scale=sm_scale
    )
    return out_BHSD, lse_BHX[..., : q_BHSD.shape[2]]


def flash_on_cpu(q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, sm_scale: float) -> tuple[Tensor, Tensor]:
    """One segment, by the kernel that `scaled_dot_product_attention` uses on CPUs."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
        q_BHSD, k_BKSD, v_BKSD, 0.0, True, scale=sm_scale
    )


def chunked(
    q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, sm_scale: float, window: int | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """One segment, a chunk of rows at a time, in fp32 or wider."""
    heads, length = k_BKSD.shape[1], q_BHSD.shape[2]
    wide = compute_dtype(q_BHSD)
    k, v = k_BKSD.to(wide)[:, :, None], v_BKSD.to(wide)[:, :, None]
    q = q_BHSD.to(wide).unflatten(1, (heads, -1)) * sm_scale
    rows = max(1, CHUNK_BYTES // (q_BHSD.shape[1] * length * wide.itemsize))
    outputs, normalisers = [], []
    for first in range(0, length, rows):
        last = min(length, first + rows)
        lowest = 0 if window is None else max(0, first - window + 1)
        scores = q[:, :, :, first:last] @ k[..., lowest:last, :].transpose(-1, -2)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        at = torch.arange(first, last, device=q.device)[:, None]
        to = torch.arange(lowest, last, device=q.device)
        hidden = to > at
        if window is not None:
            hidden = hidden | (to <= at - window)
        scores.masked_fill_(hidden, -torch.inf)
        normalisers.append(scores.logsumexp(-1))
        outputs.append(scores.sub_(normalisers[-1][..., None]).exp_() @ v[..., lowest:last, :])
    output, lse = torch.cat(outputs, dim=3), torch.cat(normalisers, dim=3)
    return output.flatten(1, 2).to(v_BKSD.dtype), lse.flatten(1, 2)
