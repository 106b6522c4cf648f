"""The only place that touches transformers' internals: families, hooks, the attention function and the cache layer."""

from seergate.host.hooks import Handle, attach, attached, handle_of

__all__ = ["Handle", "attach", "attached", "handle_of"]
