"""Runs a frozen model on packed sequences while a callback computes the attention of all layers.

Meanwhile the decoder's configuration names seergate's attention function. So transformers creates no mask, which would
take a gigabyte for a pack of 32k tokens, and every layer calls the callback, with or without a gate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from seergate import ops
from seergate.models import families
from seergate.models.hooks import ATTENTION_NAME, AttentionSwap, QKHook, attention_input
from seergate.ops.attention import PackedAttention


@dataclass
class TeacherCall:
    """The inputs of one attention layer over a pack.

    Attributes:
        hidden_BSW: input of the attention module.
        query_BHSD, key_BKSD, value_BKSD: after RoPE, in one dtype; B is 1, and S is the number of the pack's tokens.
        q_pre_BHSD, k_pre_BKSD: queries and keys before RoPE; ``None`` in layers without a hook.
        sm_scale: factor of the scores.
        window: sliding window in tokens, or ``None``.
        sinks: ``[H]`` attention-sink logits, or ``None``.
        softcap: cap on the scores, or ``None``.
    """

    layer: int
    hidden_BSW: Tensor
    query_BHSD: Tensor
    key_BKSD: Tensor
    value_BKSD: Tensor
    q_pre_BHSD: Tensor | None
    k_pre_BKSD: Tensor | None
    sm_scale: float
    window: int | None
    sinks: Tensor | None
    softcap: float | None

    def attention(self, cu_seqlens: Tensor) -> PackedAttention:
        """Compute the model's own attention over the pack: outputs and log-sum-exp of the scores."""
        q, k, v = (x[0].transpose(0, 1) for x in (self.query_BHSD, self.key_BKSD, self.value_BKSD))
        options: dict[str, Any] = {"window": self.window, "sinks": self.sinks, "softcap": self.softcap}
        return ops.packed_attention(q, k, v, cu_seqlens, self.sm_scale, **options)


@contextmanager
def intercepted_attention(
    model: PreTrainedModel, hooked: Collection[int], attend: Callable[[TeacherCall], Tensor]
) -> Iterator[None]:
    """Compute all attention layers of ``model`` in a ``with`` block by ``attend``, which returns ``[1, S, H, D]``. Its
    calls include q and k before RoPE in the layers ``hooked``.
    """
    config: Any = families.decoder_of(model).config
    with ExitStack() as undo:
        for layer, attention in families.attention_modules(model):
            qk_hook = QKHook(model, attention) if layer in hooked else None
            if qk_hook is not None:
                undo.callback(qk_hook.remove)
            pack = _PackedAttention(layer, families.window_of(model, layer), qk_hook, attend)
            undo.callback(AttentionSwap(attention, pack.before_forward, pack.attention).undo)
        undo.callback(setattr, config, "_attn_implementation_internal", config._attn_implementation_internal)
        config._attn_implementation_internal = ATTENTION_NAME
        yield


class _PackedAttention:
    """The attention function of one layer, and the pre-hook that notes the module's input."""

    def __init__(
        self, layer: int, window: int | None, qk_hook: QKHook | None, attend: Callable[[TeacherCall], Tensor]
    ) -> None:
        self.layer, self.window, self.qk_hook, self.attend = layer, window, qk_hook, attend

    def before_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Note the module's input."""
        self.hidden = attention_input(args, kwargs)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Call ``attend``; arguments and result as in `seergate.models.hooks.seergate_attention`."""
        q_pre, k_pre = (None, None) if self.qk_hook is None else self.qk_hook.take()
        scaling = kwargs.get("scaling")
        call = TeacherCall(
            layer=self.layer,
            hidden_BSW=self.hidden,
            # Under autocast, normalised queries and keys are wider than values; kernels need one dtype.
            query_BHSD=query.to(value.dtype),
            key_BKSD=key.to(value.dtype),
            value_BKSD=value,
            q_pre_BHSD=q_pre,
            k_pre_BKSD=k_pre,
            sm_scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            window=self.window,
            sinks=kwargs.get("s_aux"),
            softcap=kwargs.get("softcap"),
        )
        del self.hidden
        return self.attend(call), None
