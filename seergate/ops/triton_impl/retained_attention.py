"""`retained_attention` on GPUs: there is no kernel, it runs in torch."""

from __future__ import annotations

from seergate.ops.torch_impl.retained_attention import retained_attention as retained_attention
