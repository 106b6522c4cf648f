"""`retention_kl` on GPUs: there is no kernel, it runs in torch."""

from __future__ import annotations

from seergate.ops.torch_impl.retention_kl import retention_kl as retention_kl
