"""Base classes of methods: a dataclass of options, and a state per layer and request that sees every new token.

The engine owns the KV cache and the model; a method sees tensors only. Index 0 along the token axis is a row's first
real token, whatever its padding and batch.

Shape suffixes: B batch, S new tokens, C capacity of the cache, N blocks, H query heads, K KV heads, D head dimension.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from seergate.config import Rectify
from seergate.ops.rows import RowLengths


class Rotary(Protocol):
    """The base model's RoPE. ``x [B, heads, S, D]``, ``positions [B, S]``."""

    def rotate(self, x: Tensor, positions: Tensor, rows: RowLengths | None = None) -> Tensor:
        """Rotate to these positions; layers of a step that pass its ``rows`` share the angles."""

    def unrotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Undo `rotate`."""

    def scale_queries(self, q: Tensor, positions: Tensor) -> Tensor:
        """Multiply rotated queries ``[B, heads, S, D]`` by the model's factor for the last S positions, if any."""

    def check_recoverable(self, tokens: int) -> None:
        """Raise an error if `unrotate` is not exact for the keys of a text of ``tokens`` tokens."""

    def frequencies(self) -> Tensor:
        """Radians per position of each rotated pair, in the order of the pairs."""


@dataclass(frozen=True)
class LayerSpec:
    """Shape, dtype, device and RoPE of the attention layer that a state belongs to."""

    layer: int
    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    rotary: Rotary


@dataclass
class Step:
    """The new tokens of one forward pass in one layer, after they have joined the cache.

    In a compiled step (one token per row on a static cache) the host does not know the rows' lengths: ``starts`` and
    ``counts`` are empty, and a method uses ``lengths`` alone.

    Attributes:
        q_pre_BHSD, k_pre_BKSD: new queries and keys before RoPE; what follows row b's first ``counts[b]`` is padding.
        q_BHSD, k_BKSD: the same after RoPE.
        starts: tokens of each row before this pass.
        counts: new tokens of each row.
        decoded: number of each row's newest tokens that are decoded, in steps of their own or together; the tokens
            before them belong to a prompt.
        keys_BKCD, values_BKCD: the cache's buffers; row b holds ``lengths[b]`` tokens.
        lengths: int64 ``[B]`` on the model's device, tokens of each row, the new ones included.
        sm_scale: factor on the query-key products.
        sinks: ``[H]`` attention-sink logits, if the model has them.
        softcap: cap on the attention logits, if the model has one.
        offsets: per row, the position that the model gave to its first token; ``None``: all 0, or a compiled step.
        hidden: returns the attention module's input ``[B, S, W]``, each row's tokens first; ``None`` if there is no
            model, and for tokens that are decoded one by one in a pass over several.
        p_BKGT: at a decode step, the attention probabilities of all residents, 0 beyond a row's length; ``None``
            unless the state has ``reads_all_keys``.
        rows: the lengths, with tables that layers of the same lengths share.
        ends: ``lengths`` without a device read; empty in a compiled step.
    """

    q_pre_BHSD: Tensor
    k_pre_BKSD: Tensor
    q_BHSD: Tensor
    k_BKSD: Tensor
    starts: list[int]
    counts: list[int]
    keys_BKCD: Tensor
    values_BKCD: Tensor
    lengths: Tensor
    sm_scale: float
    sinks: Tensor | None = None
    softcap: float | None = None
    offsets: list[int] | None = None
    hidden: Callable[[], Tensor] | None = None
    p_BKGT: Tensor | None = None
    decoded: int = 1
    rows: RowLengths = None  # type: ignore[assignment]  # made of lengths
    ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.ends = [start + count for start, count in zip(self.starts, self.counts, strict=True)]
        if self.rows is None or self.rows.tensor is not self.lengths:
            self.rows = RowLengths(self.lengths, [max(1, end) for end in self.ends] if self.starts else None)

    @property
    def stored(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values as the ops take them, and the page table of a paged cache, otherwise ``None``."""
        return self.keys_BKCD, self.values_BKCD, None

    @property
    def softmax_options(self) -> dict[str, Any]:
        """Scale, sinks and cap, as keyword arguments of `ops.sparse_decode` and `ops.dense_decode`."""
        return {"sm_scale": self.sm_scale, "sinks": self.sinks, "softcap": self.softcap}

    @property
    def max_length(self) -> int:
        """Tokens of the longest row; in a compiled step, the capacity of the cache."""
        return max(self.ends) if self.starts else self.keys_BKCD.shape[2]


KeysOf = Callable[[int, int, int], Tensor]
"""``(row, first, end)`` -> the keys ``[1, K, end - first, D]`` of these tokens in the cache."""

OffsetOf = Callable[[int], int]
"""``row`` -> the position that the model gave to its first token; a `SeergateError` if the row's positions are not
consecutive."""


class AttentionOutput(NamedTuple):
    """Result of attention at a decode step.

    Attributes:
        output: ``[B, H, D]``.
        read: tokens that each row read, mean over KV heads, if the method's own attention ran; otherwise ``None``.
        fetched: bytes that came from slow memory; ``None`` if the cache is not offloaded.
    """

    output: Tensor
    read: Sequence[float] | None = None
    fetched: int | None = None


class LayerState:
    """State of a method in one layer during one request. Its functions are called without gradients and autocast.

    Every tensor is in ``self.rows`` with the batch axis first, so that the cache can reorder, repeat and select rows
    without knowing the method.

    Attributes:
        method: the method of this state; a subclass declares its class.
        tokens_per_entry: tokens per entry of each tensor ``rows[name] [B, K, N, ...]`` that grows with the sequence.
        reads: growing tensors that each decode step reads completely, besides keys and values.
        reads_all_keys: true if the method's decision at each decode step reads the keys of all residents.
        parts: states of other methods that this one is composed of.
    """

    method: Method
    reads: tuple[str, ...] = ()
    reads_all_keys: bool = False
    parts: tuple[LayerState, ...] = ()

    def __init__(self, spec: LayerSpec, method: Method) -> None:
        self.spec, self.method = spec, method
        self.rows: dict[str, Tensor] = {}
        self.tokens_per_entry: dict[str, int] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerState:
        """Copy the rows' tensors. The method and its gates are shared, unless they are copied as well."""
        for part in vars(self).values():
            if isinstance(part, (nn.Module, Method)):
                memo.setdefault(id(part), part)
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__dict__.update(copy.deepcopy(vars(self), memo))
        return new

    def append(self, step: Step) -> None:
        """Update the state with the new tokens. Called once per forward pass, after they have joined the cache and
        before attention; outside of inference mode, so that later calls in either mode may write to the state's
        tensors.
        """

    def crop(self, before: list[int], after: list[int], keys: KeysOf, offset_of: OffsetOf) -> None:
        """Remove the newest tokens of each row from the state.

        Args:
            before, after: tokens of each row before and after.
            keys: returns cached keys of tokens that stay.
            offset_of: returns the position of a row's first token.
        """

    def block_shared(self, row: int, newer: slice, older: slice) -> None:
        """Called when a row's blocks ``newer`` were replaced by its blocks ``older``: copies the entries of these."""
        for name in self.tokens_per_entry:
            self.rows[name][row, :, newer] = self.rows[name][row, :, older]

    def select_rows(self, index: Tensor) -> None:
        """Keep the rows ``index`` (int64), in that order; a row may be repeated."""
        self.rows = {name: tensor.index_select(0, index.to(tensor.device)) for name, tensor in self.rows.items()}
        for part in self.parts:
            part.select_rows(index)

    def append_rows(self, other: LayerState) -> None:
        """Append another state's rows. Where their tensors differ in size, zeros fill the rest."""
        for name, ours in self.rows.items():
            theirs = other.rows[name]
            size = [max(a, b) for a, b in zip(ours.shape[1:], theirs.shape[1:], strict=True)]
            joined = ours.new_zeros(ours.shape[0] + theirs.shape[0], *size)
            for place, tensor in zip(joined.split([ours.shape[0], theirs.shape[0]]), (ours, theirs), strict=True):
                place[(slice(None), *(slice(n) for n in tensor.shape[1:]))] = tensor
            self.rows[name] = joined
        for part, others in zip(self.parts, other.parts, strict=True):
            part.append_rows(others)

    @property
    def nbytes(self) -> int:
        """Bytes that this state occupies."""
        own = sum(tensor.nbytes for tensor in self.rows.values())
        return own + sum(part.nbytes for part in self.parts)

    def covered(self, held: Any, seen: Any) -> Any:
        """Number of tokens that a row's entries cover.

        Args:
            held: resident tokens of the row: a number, or an array or tensor of such numbers.
            seen: its total tokens, evicted ones included, likewise.
        """
        return seen

    def bytes_held(self, held: Any, seen: Any) -> Any:
        """State bytes of one row, without batch padding or spare capacity; arguments as in `covered`."""
        total = sum((part.bytes_held(held, seen) for part in self.parts), 0 * held)
        for name, tensor in self.rows.items():
            if name in self.tokens_per_entry:
                total = total + self._entry_bytes(name, self.covered(held, seen))
            else:
                total = total + math.prod(tensor.shape[1:]) * tensor.element_size()
        return total

    def bytes_read(self, held: Any, seen: Any, chose: bool = True) -> Any:
        """Bytes of growing tensors that a decode step of one row reads, all heads together.

        Args:
            held, seen: as in `covered`; 1 or more.
            chose: whether the method decided at this step what to read.
        """
        parts = sum((part.bytes_read(held, seen, chose) for part in self.parts), 0 * held)
        return parts + sum(self._entry_bytes(name, self.covered(held, seen)) for name in self.reads)

    def _entry_bytes(self, name: str, tokens: Any) -> Any:
        """Bytes of the entries that cover this many tokens."""
        tensor = self.rows[name]
        each = tensor.shape[1] * math.prod(tensor.shape[3:]) * tensor.element_size()
        return -(-tokens // self.tokens_per_entry[name]) * each

    def reads_all(self, seen: int) -> bool:
        """True if a row of ``seen`` tokens reads all of its blocks, even in a batch with longer rows that select."""
        return any(part.reads_all(seen) for part in self.parts)

    def grown(self, name: str, blocks: int, limit: int | None = None) -> Tensor:
        """Return ``rows[name] [B, K, N, ...]`` with at least ``blocks`` entries along N, the new ones zero. Spare room
        does not exceed ``limit`` entries, unless ``blocks`` does.
        """
        tensor = self.rows[name]
        if tensor.shape[2] < blocks:
            extra = max(blocks - tensor.shape[2], tensor.shape[2] // 8, 8)
            if limit is not None and blocks <= limit:
                extra = min(extra, limit - tensor.shape[2])
            room = tensor.new_zeros(*tensor.shape[:2], extra, *tensor.shape[3:])
            tensor = self.rows[name] = torch.cat((tensor, room), dim=2)
        return tensor


@dataclass(kw_only=True)
class Method:
    """Base of all methods. A subclass is a dataclass; its ``repr`` is its configuration."""

    name: ClassVar[str]
    state: ClassVar[type[LayerState]]
    """Class of the method's states; a method that constructs them differently overrides `new_state`."""
    kv_backend: ClassVar[str | None] = None
    """``"module:function"`` that makes the storage backend of a method that needs its own. The function gets the
    method and the user's `seergate.cache.storage.KVBackend` or ``None``, and returns the backend."""

    limits: ClassVar[tuple[str, ...]] = ("token_budget",)
    """Options that limit how much is read or kept; a configuration sets one of them."""
    budget_option: ClassVar[str] = "token_budget"
    """The option that an evaluation varies to compare methods at equal bytes."""
    from_gates: ClassVar[tuple[str, ...]] = ()
    """Options that the gates supply; empty for a method without gates."""
    shares_blocks: ClassVar[bool] = False
    """True if the method only shares blocks; its option ``reads`` is the method that selects blocks."""
    calibrates: ClassVar[Mapping[str, str]] = {}
    """The option, at most one, that can be measured on a model and a task -> ``"module:class"`` of the measurement, a
    subclass of `seergate.eval.calibration.calibrator.Calibration`."""
    serving_scores: ClassVar[str | None] = None
    """``"module:class"`` of the method's scores inside a server, a subclass of
    `seergate.serving.common.scoring.Scores`; ``None`` if the method does not run there."""
    role: ClassVar[Literal["method", "control", "bound"]] = "method"
    """Role in a comparison: a ``"control"`` chooses at random, a ``"bound"`` knows what no real method can know."""
    plot_style: ClassVar[tuple[str, str] | None] = None
    """Colour and marker in plots; an unused pair if ``None``."""

    @classmethod
    def option_names(cls) -> set[str]:
        """The options that a user gives; the gates supply the others."""
        return {option.name for option in fields(cls) if option.init} - set(cls.from_gates)

    @classmethod
    def with_gates(cls, bank: Any, **options: Any) -> Method:
        """Build the method from gates (`seergate.gates.bank.Gates`); options override the gates' decoding defaults."""
        raise NotImplementedError(f"{cls.__name__} has no gates")

    @classmethod
    def budget_values(cls, tokens: int, step: int) -> Sequence[int]:
        """Values of `budget_option` for texts of ``tokens`` tokens, from fewest bytes to most.

        Args:
            tokens: tokens of the text.
            step: tokens between two budgets.
        """
        return range(step, -(-tokens // step) * step + 1, step)

    @classmethod
    def searched_values(cls) -> dict[str, Sequence[float]]:
        """Further options that an evaluation may vary to equalise bytes, where they are ``auto``, with their values
        from fewest bytes to most.
        """
        return {}

    @property
    def stores_pre_rope(self) -> bool:
        """True if the cache should hold keys before RoPE (the method rotates them itself)."""
        return False

    @property
    def chunked_prefill(self) -> bool:
        """True if a prompt may come in several forward passes."""
        return True

    def anchor_of(self, layer: int) -> int:
        """Index of the layer that selects the blocks for ``layer``: the layer itself, or one below it."""
        return layer

    @property
    def fixed_shapes(self) -> bool:
        """True if a decode step runs the same operations for all row lengths, so that it can be compiled."""
        return False

    @property
    def nominal(self) -> str:
        """The nominal budget as text: tokens, a threshold, or ``"all"``."""
        for name, sign in (("token_budget", ""), ("threshold", "p > "), ("top_p", "top-p ")):
            value = getattr(self, name, None)
            if value is not None:
                return f"{sign}{value}"
        return "all"

    @property
    def splits_groups(self) -> bool:
        """True if the query heads of a group may read different blocks."""
        return False

    @property
    def max_rollback(self) -> int | None:
        """Maximum number of tokens that one rectification may recompute; ``None`` for any number."""
        return None

    def describe(self) -> dict[str, Any]:
        """Options by name, defaults included, as plain YAML types; gates are left out."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in vars(self).items()
            if key in self.__dataclass_fields__ and not isinstance(value, (nn.Module, Method))
        }

    @property
    def correction(self) -> Rectify | None:
        """The correction that is part of the method; a correction passed to `seergate.attach` replaces it."""
        return None

    @property
    def calibrated_on(self) -> str | None:
        """`fingerprint` of the only model that the method was calibrated for; ``None`` if it fits any model."""
        return None

    @property
    def read_method(self) -> Method:
        """The method that selects blocks: this one, unless it only decides where keys and values are stored."""
        return self

    def new_state(self, spec: LayerSpec) -> LayerState:
        """A fresh state for one layer of one request."""
        return self.state(spec, self)
