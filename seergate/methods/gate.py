"""The learned gate (SeerAttention-R, sections 3.1 and 3.2).

Besides the KV cache, the state holds the K-compression cache (the scorer's entries, one per block or token) and the
pre-RoPE keys of the two newest entries, from which an entry is computed when it is complete. Entries from prefill and
from decode steps are equal up to rounding.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from seergate.config import DecodeConfig
from seergate.errors import SeergateError
from seergate.methods.base import KeysOf, LayerSpec, LayerState, Method, OffsetOf, Step
from seergate.methods.selecting import PerHeadSelection, SelectingMethod, SelectingState
from seergate.ops import Selection
from seergate.ops.rows import RowLengths

if TYPE_CHECKING:
    from seergate.gates.bank import Gates
    from seergate.gates.scorer import Scorer


@dataclass(kw_only=True, eq=False)
class GatedMethod(Method):
    """A method with trained gates.

    Attributes:
        bank: the gates.
    """

    from_gates: ClassVar[tuple[str, ...]] = ("bank",)
    bank: Gates = field(repr=False)

    def check_bank(self) -> None:
        """Raise `SeergateError` if ``bank`` is not a gate bank."""
        if not hasattr(getattr(self.bank, "config", None), "block_size"):
            raise SeergateError(f"bank is a {type(self.bank).__name__}; it must be a GateBank")
        self._copies: dict[tuple[int, torch.device], nn.Module] = {}

    def __eq__(self, other: Any) -> bool:
        """True for the same options, and the same gates or gates with equal weights."""
        if type(other) is not type(self):
            return False
        options = [option.name for option in fields(self) if option.name != "bank"]
        return all(getattr(self, name) == getattr(other, name) for name in options) and _same(self.bank, other.bank)

    def gate_on(self, spec: LayerSpec) -> Any:
        """Return a layer's gate on the layer's device, or ``None`` without one. On another device than the bank it is
        a copy, which gets the bank's weights for every new cache but keeps its address.
        """
        if str(spec.layer) not in self.bank.layers:
            return None
        gate, key = self.bank.layers[str(spec.layer)], (spec.layer, spec.device)
        if next(gate.parameters()).device == spec.device:
            return gate
        if key not in self._copies:
            self._copies[key] = copy.deepcopy(gate).to(spec.device)
        self._copies[key].load_state_dict(gate.state_dict())
        return self._copies[key]


def _same(one: Gates, other: Gates) -> bool:
    if one is other:
        return True
    ours, theirs = one.state_dict(), other.state_dict()
    return (
        (one.config, one.geometry) == (other.config, other.geometry)
        and ours.keys() == theirs.keys()
        and all(
            tensor.dtype == theirs[name].dtype and torch.equal(tensor.cpu(), theirs[name].cpu())
            for name, tensor in ours.items()
        )
    )


@dataclass(kw_only=True, eq=False)
class Gate(GatedMethod, SelectingMethod):
    """Read the blocks that trained gates select.

    Attributes:
        bank: the gates; they determine the block size.
        compat: ``"published"`` reproduces the published code's selection (see `DecodeConfig.compat`); ``"gates"``
            takes the bank's setting.
        block_size: the bank's block size; 0 is replaced by it.
        sink_blocks: number of first blocks that are always read, within the budget and outside the softmax; ``None``
            takes the number that the gates were trained with.

    Raises:
        SeergateError: for gates that score tokens for eviction.
        ValueError: for another block size than the bank's, or an option out of range.
    """

    name = "gate"
    plot_style = ("#D55E00", "o")
    serving_scores = "seergate.serving.common.scoring:GateScores"
    from_gates = ("bank", "block_size")
    compat: Literal["published", "gates"] | None = "gates"
    block_size: int = 0
    sink_blocks: int = None  # type: ignore[assignment]  # depends on the bank

    def __post_init__(self) -> None:
        self.check_bank()
        size, scorer = self.bank.config.block_size, self.bank.config.scorer
        if self.bank.config.retention:
            raise SeergateError(f"these gates score tokens for eviction; they are for the method {scorer!r}")
        if self.block_size not in (0, size):
            raise ValueError(f"block_size is {self.block_size!r}; these gates are for blocks of {size} tokens")
        self.block_size = size
        if self.sink_blocks is None:
            self.sink_blocks = self.bank.config.sink_blocks
        if self.compat == "gates":
            self.compat = "published" if self.bank.decode_defaults.get("compat") == "published" else None
        super().__post_init__()

    @classmethod
    def with_gates(cls, bank: Gates, **options: Any) -> Gate:
        decoding = {name: options.pop(name) for name in DecodeConfig.__dataclass_fields__ if name in options}
        return cls.from_config(bank, bank.decode_config(**decoding), **options)

    @classmethod
    def from_config(cls, bank: Gates, decode: DecodeConfig, **options: Any) -> Gate:
        """Build the method from gates and a `DecodeConfig`; ``options`` are those that a subclass adds."""
        return cls(bank=bank, **vars(decode), **options)

    def new_state(self, spec: LayerSpec) -> LayerState:
        """State of one layer; a layer without a gate stays dense."""
        gate = self.gate_on(spec)
        return LayerState(spec, self) if gate is None else GateState(spec, self, gate)

    def selects_in(self, layer: int) -> bool:
        return super().selects_in(layer) and str(self.anchor_of(layer)) in self.bank.layers

    @property
    def max_rollback(self) -> int:
        """One block, as the state holds the pre-RoPE keys of two."""
        return self.block_size

    @property
    def fixed_shapes(self) -> bool:
        return self.compat is None and self.dense_below == 0

    def select(self, state: LayerState, step: Step) -> Selection | PerHeadSelection | None:
        return super().select(state, step) if isinstance(state, GateState) else None

    @property
    def always_selects(self) -> bool:
        """True with ``compat="published"``, as in the published code."""
        return self.compat == "published"

    def choose(self, scores_BKN: Tensor, lengths: Tensor | RowLengths) -> Selection:
        if self.compat == "published":
            return published_selection(scores_BKN, RowLengths.of(lengths).tensor, self.block_size, self)
        return super().choose(scores_BKN, lengths)


class GateState(SelectingState):
    """``kg [B, J, M, E]``: the K-compression cache, entries of ``size`` tokens each. ``recent [B, K, 2 * size, D]``:
    the pre-RoPE keys of the newest tokens, that of token p at slot ``p % (2 * size)``.
    """

    reads = ("kg",)

    def __init__(self, spec: LayerSpec, method: Gate, gate: Scorer) -> None:
        super().__init__(spec, method)
        self.gate, self.size = gate, gate.entry_tokens
        self.tokens_per_entry = {"kg": self.size}
        self.decode_offset = self.size - 1 if method.compat == "published" else 0
        rows, dtype, device = spec.batch, gate.k_proj.weight.dtype, spec.device
        recent = (rows, spec.num_kv_heads, 2 * self.size, spec.head_dim)
        self.rows = {
            "kg": torch.zeros(rows, gate.key_heads, 0, gate.config.gate_dim, dtype=dtype, device=device),
            "recent": torch.zeros(recent, dtype=spec.dtype, device=device),
            "oldest": torch.zeros(spec.batch, dtype=torch.int64, device="cpu"),  # lowest position held in `recent`
        }

    def append(self, step: Step) -> None:
        entries = self.grown("kg", -(-step.max_length // self.size))
        if step.decoded == step.k_pre_BKSD.shape[2] == 1 and all(step.counts):
            newest, recent = step.k_pre_BKSD[:, :, 0], self.rows["recent"]
            self.gate.remember(newest, step.rows, recent, entries, position_offset=self.decode_offset)
        else:
            self._append_many(step)

    def _append_many(self, step: Step) -> None:
        """Compute all entries that the new tokens complete, one row at a time. Entries that a decoded token completes
        are placed as in a decode step.
        """
        size, recent, kg = self.size, self.rows["recent"], self.rows["kg"]
        for row, (start, count) in enumerate(zip(step.starts, step.counts, strict=True)):
            opened = start - start % size  # first token of the entry that was open
            ring = torch.arange(opened, start, device=recent.device) % (2 * size)
            keys_KSD = torch.cat((recent[row][:, ring], step.k_pre_BKSD[row, :, :count].to(recent.dtype)), dim=1)
            first, complete = opened // size, (start + count) // size
            if complete > first:
                pooled = self.gate.pool(keys_KSD[None, :, : (complete - first) * size])
                positions = torch.arange(first, complete, device=recent.device) * size
                prompt = start + count - min(step.decoded, count)
                positions = positions + (positions + size > prompt) * self.decode_offset
                kg[row, :, first:complete] = self.gate.keys(pooled, positions)[0]
            newest = min(keys_KSD.shape[1], 2 * size)
            ring = torch.arange(start + count - newest, start + count, device=recent.device) % (2 * size)
            recent[row][:, ring] = keys_KSD[:, keys_KSD.shape[1] - newest :]

    def bytes_read(self, held: Any, seen: Any, chose: bool = True) -> Any:
        """Bytes of the entries that a step reads, which exclude the entry of the current token's block."""
        return super().bytes_read(held - self.size, seen - self.size, chose)

    def scores(self, step: Step) -> Tensor:
        return self.gate.step_scores(step.q_pre_BHSD[:, :, 0], step.rows, self.rows["kg"])

    def block_shared(self, row: int, newer: slice, older: slice) -> None:
        each = self.block_size // self.size  # entries of a block
        super().block_shared(row, *(slice(part.start * each, part.stop * each) for part in (newer, older)))

    def crop(self, before: list[int], after: list[int], keys: KeysOf, offset_of: OffsetOf) -> None:
        """Crop; pre-RoPE keys of a reopened entry that are gone are recovered from the cached keys by undoing RoPE."""
        size, recent, oldest = self.size, self.rows["recent"], self.rows["oldest"]
        for row, (old, new) in enumerate(zip(before, after, strict=True)):
            held_from = max(int(oldest[row]), old - 2 * size)
            opened = new - new % size
            if opened < held_from:
                if opened < new:
                    self.spec.rotary.check_recoverable(old + offset_of(row))
                    index = torch.arange(opened, new, device=recent.device)
                    rotated = keys(row, opened, new).to(recent.device)
                    raw = self.spec.rotary.unrotate(rotated, index[None] + offset_of(row))
                    recent[row][:, index % (2 * size)] = raw[0]
                held_from = opened
            oldest[row] = held_from


def published_selection(scores_BKN: Tensor, lengths: Tensor, block_size: int, rule: DecodeConfig | Gate) -> Selection:
    """Select blocks like the published decode loop, from the gates' logits, in rows of ``lengths [B]`` tokens.

    The block of the newest token takes part in softmax and top-k: with logit 0 while it is open, with its own score
    once it is complete. The last and the first block are then read on top of the budget.
    """
    used = -(-lengths // block_size)  # blocks in use, the open one included
    width = int(used.max())
    blocks = torch.arange(width, device=lengths.device)
    valid = (blocks < used[:, None])[:, None]
    last = (blocks == used[:, None] - 1)[:, None]
    is_open = last & (lengths % block_size != 0)[:, None, None]
    logits = scores_BKN[..., :width].float().masked_fill(is_open, 0.0).masked_fill(~valid, -torch.inf)
    if rule.threshold is not None:
        chosen = logits.softmax(-1) > rule.threshold
    else:
        assert rule.token_budget is not None
        # a stable sort: ties go to the lower block, whatever else is in the batch
        ranked = logits.sort(dim=-1, descending=True, stable=True).indices
        best = ranked[..., : min(width, rule.token_budget // block_size)]
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, best, True)
    chosen = (chosen | last | (blocks == 0)) & valid
    counts = chosen.sum(-1)
    indices = torch.where(chosen, blocks, width).sort(-1).values[..., : int(counts.max())]
    return Selection(indices.masked_fill(indices == width, -1).int(), counts.int())
