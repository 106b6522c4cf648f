"""`scorer_kl` on GPUs: what ``scores`` does is not known to a kernel, so it runs in torch."""

from __future__ import annotations

from seergate.ops.torch_impl.scorer_kl import scorer_kl as scorer_kl
