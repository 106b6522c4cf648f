"""Rectification: after every few sparse steps, one dense pass recomputes the keys and values of their tokens (ReSA).

Sparse steps store keys and values that come from sparse hidden states, and later steps build on them. ReSA (Sun et al.
2025, arXiv 2506.04108; section 5.4 of SeerAttention-R) bounds the accumulated error: after ``n`` sparse steps, one
dense pass runs over the last ``n`` tokens. Cache and method state are then those of a dense prefill of the same
tokens. Emitted tokens never change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from seergate.cache.batching import only_rows, rows_are_independent
from seergate.cache.forward import CACHE, VERIFIED_TOKENS, ForwardModes, cache_of
from seergate.cache.layer import GatedLayer
from seergate.config import Rectify
from seergate.decode.compatibility import refuse
from seergate.errors import SeergateError
from seergate.inference_mode import outside_inference_mode
from seergate.methods.base import Method
from seergate.methods.selecting import SelectingMethod

IDS, POSITIONS, DENSE = "rectify_ids", "rectify_positions", "rectify_dense"
"""Entries in the state of a cache's first gated layer, so that they follow its rows: ids and positions of each row's
newest tokens, ``[B, R]``, token ``i`` at slot ``i % R``; and the number of leading tokens that are dense, ``[B]``."""


class Rectification:
    """Rectifies the caches of one model; ``layers`` are the indices of those that can be gated."""

    def __init__(
        self, options: Rectify, decoder: nn.Module, method: Method, layers: Sequence[int], passes: ForwardModes
    ) -> None:
        assert isinstance(method, SelectingMethod)
        self.every, self.decoder, self.method = options.every, decoder, method
        self.layers, self.passes = layers, passes
        self.busy = False  # while a dense pass of its own runs
        # ids of the pass and their embeddings, which multimodal classes give to the decoder
        self._embedded: tuple[Tensor, Tensor] | None = None
        self.reset()
        self._hooks = [
            decoder.get_input_embeddings().register_forward_hook(self._see, with_kwargs=True),  # type: ignore[operator,union-attr]
            decoder.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            decoder.register_forward_hook(self._after_forward, with_kwargs=True),
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        while self._hooks:
            self._hooks.pop().remove()

    def reset(self) -> None:
        """Reset the counters."""
        self.dense_passes = self.tokens = 0

    def stats(self) -> dict[str, Any]:
        """``"rectification"``: the interval ``every``, the number of dense ``passes`` and of recomputed ``tokens``."""
        return {"rectification": {"every": self.every, "passes": self.dense_passes, "tokens": self.tokens}}

    def _before_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Rectify the tokens that are due before the new tokens are processed."""
        if self.busy:
            return
        cache = cache_of(kwargs)
        layer = self._first_layer(cache)
        new = _arriving(args, kwargs).shape[1]
        decoded = self.passes.mode(cache, 0 if layer is None else layer.rows.slots, new).decoded
        if decoded > VERIFIED_TOKENS:
            raise SeergateError(
                f"{decoded} tokens are to be decoded in one pass, drafts or forced; with rectification they must be "
                f"{VERIFIED_TOKENS} at most"
            )
        if layer is None or layer.state is None or layer.rows.slots == 0:
            return
        if DENSE not in layer.state.rows:
            raise SeergateError("this cache was filled without rectification; start a new one")
        if stuck := sorted({type(layer).__name__ for layer in cache.layers if not layer.is_croppable}):
            refuse({"rectified": "rectification", "one-way cache": f"a {', '.join(stuck)}"})
        dense = [min(pair) for pair in zip(layer.state.rows[DENSE].tolist(), layer.rows.resident, strict=True)]
        layer.state.rows[DENSE] = torch.tensor(dense, device="cpu")  # tokens may have been cropped
        sparse = [length - done for length, done in zip(layer.rows.resident, dense, strict=True)]
        # A chunk that attends densely must not build on sparse tokens.
        due = 1 if decoded < new else self.every
        if not rows_are_independent(cache):
            if max(sparse) >= due and all(map(self.method.reads_all, layer.rows.resident)):  # so have all steps so far
                layer.state.rows[DENSE], sparse = torch.tensor(layer.rows.resident, device="cpu"), [0] * len(sparse)
            _record_past(cache, nothing_pending=not any(sparse))
            sparse = [max(sparse)] * len(sparse)
        for count in sorted({count for count in sparse if count >= due}):
            self._rectify(cache, layer, [row for row, pending in enumerate(sparse) if pending == count], count)

    def _see(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> None:
        if not self.busy:
            self._embedded = args[0] if args else kwargs["input"], output

    @outside_inference_mode
    def _after_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Record ids and positions of the new tokens."""
        if self.busy:
            return
        embedded, self._embedded = self._embedded, None
        cache = cache_of(kwargs)
        if cache is None:  # the model has made one
            cache = getattr(output, CACHE, None)
        layer = self._first_layer(cache)
        if layer is None or layer.state is None:
            return
        rows = layer.state.rows
        batch, slots = len(layer.rows), self.every + VERIFIED_TOKENS
        if DENSE not in rows:
            rows[IDS] = torch.zeros(batch, slots, dtype=torch.int64, device=layer.device)
            rows[POSITIONS] = torch.zeros_like(rows[IDS])
            rows[DENSE] = torch.zeros(batch, dtype=torch.int64, device="cpu")
        ids = _arriving(args, kwargs)
        if ids.is_floating_point() and embedded is not None and embedded[1] is ids:
            ids = embedded[0]
        arrived = ids.shape[1]
        new = self.passes.mode(cache, layer.rows.slots - arrived, arrived).decoded
        if new < arrived:  # a prompt, or a chunk of one; drafts may come along with it
            rows[DENSE] = torch.tensor(layer.rows.resident, device="cpu") - new
        if not new:
            return
        if ids.is_floating_point():
            raise SeergateError("rectification needs the decoded tokens as input_ids, and they came as embeddings")
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(layer.rows.slots - new, layer.rows.slots)[None]
        elif positions.ndim == 3:  # time, height and width, which are the same for text
            positions = positions[0]
        positions = positions[:, -new:]
        at = layer.rows.lengths[:, None] - new + torch.arange(new, device=layer.device)
        rows[IDS].scatter_(1, at % slots, ids[:, -new:].to(layer.device).expand(batch, -1))
        rows[POSITIONS].scatter_(1, at % slots, positions.to(rows[POSITIONS]).expand(batch, -1))
        # A row whose steps so far read everything is dense already. Rows that are rectified together count all steps.
        every_layer, apart = set(self.layers) <= set(self.method.dense_layers), rows_are_independent(cache)
        whole = [every_layer or (apart and self.method.reads_all(length)) for length in layer.rows.resident]
        spans = zip(rows[DENSE].tolist(), layer.rows.resident, whole, strict=True)
        dense = [end if all_read and done == end - new else done for done, end, all_read in spans]
        rows[DENSE] = torch.tensor(dense, device="cpu")

    def _first_layer(self, cache: Any) -> GatedLayer | None:
        if not isinstance(cache, Cache) or len(cache.layers) <= self.layers[0]:
            return None
        layer = cache.layers[self.layers[0]]
        return layer if isinstance(layer, GatedLayer) else None

    @torch.no_grad()
    def _rectify(self, cache: Cache, layer: GatedLayer, rows: list[int], count: int) -> None:
        """Recompute the newest ``count`` tokens of these rows densely."""
        if len(rows) < len(layer.rows):
            with only_rows(cache, rows):
                self._rectify(cache, layer, list(range(len(rows))), count)
            return
        assert layer.state is not None
        for other in cache.layers:
            if getattr(other, "record_past", False) and other.keys.shape[2] < min(
                other.cumulative_length, other.sliding_window - 1 + count
            ):
                raise SeergateError(
                    "this cache was cropped, by the caller or for rejected drafts, which has shortened the sliding "
                    "windows that rectification goes back to; leave out the crop, the drafts or the correction"
                )
        stored, ends = layer.state.rows, list(layer.rows.resident)
        at = (layer.rows.lengths[:, None] - count + torch.arange(count, device=layer.device)) % stored[IDS].shape[1]
        ids, positions = stored[IDS].gather(1, at), stored[POSITIONS].gather(1, at)
        try:
            cache.crop(-count)
            if any(end - length != count for end, length in zip(ends, layer.rows.resident, strict=True)):
                raise SeergateError("rectification needs every row to take every decoded token, and some were masked")
            self._read_densely(cache, layer, ids, positions)
        except BaseException:  # the layers may hold different tokens now
            for each in cache.layers:
                if isinstance(each, GatedLayer):
                    each.state, each.failed = None, True
            raise
        layer.state.rows[DENSE] = torch.tensor(ends, device="cpu")
        self.dense_passes += 1
        self.tokens += count * len(ends)

    def _read_densely(self, cache: Cache, layer: GatedLayer, ids: Tensor, positions: Tensor) -> None:
        """Run a dense pass over the same number of tokens in all rows."""
        padded = layer.rows.valid is not None
        mask = pad(layer.rows.real_slots(), (0, ids.shape[1]), value=True).long() if padded else None
        device = self.decoder.get_input_embeddings().weight.device  # type: ignore[operator,union-attr]
        if device.type == "meta":  # accelerate loads such weights on use
            device = layer.device
        self.busy = True
        try:
            with self.passes.forced("dense"):
                self.decoder(
                    input_ids=ids.to(device),
                    position_ids=positions.to(device),
                    attention_mask=None if mask is None else mask.to(device),
                    **{CACHE: cache},
                    use_cache=True,
                )
        finally:
            self.busy = False


def _arriving(args: Any, kwargs: dict[str, Any]) -> Tensor:
    """The new tokens of a pass, padding included: ids ``[B, S]``, or embeddings ``[B, S, W]``."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    return kwargs["inputs_embeds"] if ids is None else ids


def _record_past(cache: Cache, nothing_pending: bool) -> None:
    """Make sliding-window layers keep tokens that newer ones push out of the window, so that they can be cropped."""
    for layer in cache.layers:
        if hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
            if nothing_pending:
                layer.crop(0)  # releases the tokens outside of the window
