"""What a decoding method is: a dataclass of options, and a per-layer, per-request state that sees every new token.

The host owns the KV cache and the model; a method sees tensors only. Rows are content-anchored: index 0 along the
token axis is a row's first real token, whatever padding or batch it came in.

Shape suffixes: B batch, S new tokens, C capacity of the cache, N blocks, H query heads, K KV heads, D head dimension.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from seergate import ops
from seergate.config import DecodeConfig, is_int
from seergate.methods.short_rows import with_all_blocks
from seergate.ops import Selection


class Rotary(Protocol):
    """The base model's RoPE. ``x [B, heads, S, D]``, ``positions [B, S]``."""

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate to these positions."""
        ...

    def unrotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Undo `rotate`."""
        ...

    def frequencies(self) -> Tensor:
        """Radians per position of each pair that is rotated, the first pair's first."""
        ...


@dataclass(frozen=True)
class LayerSpec:
    """The facts about one attention layer that a state is made for."""

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
    """The new tokens of one forward in one layer, after they joined the cache.

    Attributes:
        q_pre_BHSD, k_pre_BKSD: before RoPE; each row's tokens first, whatever follows ``counts[b]`` is padding.
        q_BHSD, k_BKSD: the same after RoPE.
        starts: per row, how many tokens it had before.
        counts: per row, how many are new.
        keys_BKCD, values_BKCD: the cache's buffers; row b holds ``lengths[b]`` tokens.
        lengths: int64 ``[B]`` on the cache's device, the new tokens included.
        sm_scale: factor on query . key.
        sinks: ``[H]`` attention-sink logits, if the model has them.
        softcap: cap on the scores, if the model has one.
        offsets: per row, the position that the model gave to its first token; ``None`` for 0.
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

    @property
    def stored(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values as the ops take them, and the page table where they lie in pages."""
        return self.keys_BKCD, self.values_BKCD, None

    @property
    def ends(self) -> list[int]:
        """Per row, how many tokens it has now: ``lengths`` without a device read."""
        return [start + count for start, count in zip(self.starts, self.counts, strict=True)]

    @property
    def host_lengths(self) -> list[int] | None:
        """`ends`, or ``None`` where the host does not know them."""
        return self.ends

    @property
    def max_length(self) -> int:
        """Tokens of the longest row."""
        return max(self.ends)


class LayerState:
    """What a method remembers of one layer during one request.

    Every tensor lives in ``self.rows`` with the batch axis first, so that the cache can reorder, repeat and select
    rows without knowing the method.

    Attributes:
        per_block: names of the tensors ``rows[name] [B, K, N, ...]`` that say something about the keys of a block.
    """

    per_block: tuple[str, ...] = ()

    def __init__(self, spec: LayerSpec) -> None:
        self.spec = spec
        self.rows: dict[str, Tensor] = {}

    def append(self, step: Step) -> None:
        """See the new tokens. Called once per forward, after they joined the cache and before attention."""

    def crop(self, before: list[int], after: list[int], keys_BKCD: Tensor, offsets: list[int]) -> None:
        """Forget the newest tokens.

        Args:
            before, after: tokens of each row.
            keys_BKCD: the cache's keys, cropped already.
            offsets: per row, the position that the model gave to its first token.
        """

    def block_shared(self, row: int, newer: slice, older: slice) -> None:
        """Blocks of a row have been replaced by older ones of it: what is known of these holds for both now."""
        for name in self.per_block:
            self.rows[name][row, :, newer] = self.rows[name][row, :, older]

    def select_rows(self, index: Tensor) -> None:
        """Keep the rows ``index`` (int64), in that order; a row may be repeated."""
        self.rows = {name: tensor.index_select(0, index.to(tensor.device)) for name, tensor in self.rows.items()}

    def append_rows(self, other: LayerState) -> None:
        """Put another state's rows after this one's. Where their tensors differ in size, zeros fill what is unused."""
        for name, ours in self.rows.items():
            theirs = other.rows[name]
            size = [max(a, b) for a, b in zip(ours.shape[1:], theirs.shape[1:], strict=True)]
            joined = ours.new_zeros(ours.shape[0] + theirs.shape[0], *size)
            for part, tensor in zip(joined.split([ours.shape[0], theirs.shape[0]]), (ours, theirs), strict=True):
                part[(slice(None), *(slice(n) for n in tensor.shape[1:]))] = tensor
            self.rows[name] = joined

    @property
    def nbytes(self) -> int:
        """Bytes that this state occupies."""
        return sum(tensor.nbytes for tensor in self.rows.values())

    def grown(self, name: str, blocks: int, fill: float = 0.0, limit: int | None = None) -> Tensor:
        """The tensor ``rows[name] [B, K, N, ...]``, enlarged along its block axis if need be; beyond ``limit`` only as
        far as ``blocks`` asks for.
        """
        tensor = self.rows[name]
        if tensor.shape[2] < blocks:
            extra = max(blocks - tensor.shape[2], tensor.shape[2] // 8, 8)
            if limit is not None and blocks <= limit:
                extra = min(extra, limit - tensor.shape[2])
            room = tensor.new_full((*tensor.shape[:2], extra, *tensor.shape[3:]), fill)
            tensor = self.rows[name] = torch.cat((tensor, room), dim=2)
        return tensor


@dataclass(kw_only=True)
class Method(ABC):
    """Base of all methods. A subclass is a dataclass; its ``repr`` is its configuration."""

    name: ClassVar[str]

    @property
    def stores_pre_rope(self) -> bool:
        """Whether the cache should hold keys before RoPE (the method rotates them itself)."""
        return False

    @property
    def fixed_shapes(self) -> bool:
        """Whether a decode step can be the same operations whatever the rows' lengths (`methods.fixed_step`)."""
        return False

    @property
    def nominal(self) -> str:
        """What the method is given to read or to hold, for people: its token budget, its threshold, or ``"all"``."""
        for name, sign in (("token_budget", ""), ("threshold", "p > "), ("top_p", "top-p ")):
            value = getattr(self, name, None)
            if value is not None:
                return f"{sign}{value}"
        return "all"

    @abstractmethod
    def new_state(self, spec: LayerSpec) -> LayerState:
        """A fresh state for one layer of one request."""


@dataclass(kw_only=True)
class SelectingMethod(Method):
    """Keeps the whole cache and reads some of its blocks at each step.

    Attributes:
        token_budget, threshold, top_p, sink_blocks, dense_layers, dense_below, rectify_every, lossless, draft_tokens:
            see `DecodeConfig`.
        block_size: tokens per block.
    """

    token_budget: int | None = None
    threshold: float | None = None
    top_p: float | None = None
    sink_blocks: int = 0
    dense_layers: tuple[int, ...] = ()
    dense_below: int = 0
    rectify_every: int | None = None
    lossless: bool = False
    draft_tokens: int | None = None
    block_size: int = 64

    def __post_init__(self) -> None:
        self.rule = DecodeConfig(
            token_budget=self.token_budget,
            threshold=self.threshold,
            top_p=self.top_p,
            sink_blocks=self.sink_blocks,
            dense_layers=self.dense_layers,
            dense_below=self.dense_below,
            rectify_every=self.rectify_every,
            lossless=self.lossless,
            draft_tokens=self.draft_tokens,
            compat=None,
        )
        if not is_int(self.block_size) or self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size!r}; it must be a positive number of tokens")
        self.rule.check_block_size(self.block_size)
        self.token_budget = self.rule.token_budget

    def select(self, state: SelectingState, step: Step) -> Selection | None:
        """The blocks to read at a decode step, or ``None`` for all of them."""
        rule = self.rule
        if (
            state.spec.layer in rule.dense_layers
            or self.covers(step.max_length)
            or step.max_length <= rule.dense_below
        ):
            return None
        selection = self.choose(state.scores(step), step.lengths)
        if rule.dense_below:
            selection = with_all_blocks(selection, step.ends, self.block_size, rule.dense_below)
        return selection

    def choose(self, scores_BKN: Tensor, lengths: Tensor) -> Selection:
        """The blocks that the rule picks by these scores, in rows of ``lengths [B]`` tokens."""
        return ops.select_blocks(
            scores_BKN,
            lengths,
            block_size=self.block_size,
            token_budget=self.rule.token_budget,
            threshold=self.rule.threshold,
            top_p=self.rule.top_p,
            sink_blocks=self.rule.sink_blocks,
        )

    def covers(self, length: int) -> bool:
        """Whether the budget has room for every block of ``length`` tokens."""
        budget = self.rule.token_budget
        return budget is not None and budget // self.block_size >= -(-length // self.block_size)


class SelectingState(LayerState, ABC):
    """State of a `SelectingMethod`."""

    @abstractmethod
    def scores(self, step: Step) -> Tensor:
        """Score every block for the newest token of each row: ``[B, K, N]``, higher is better. Entries of the current
        block and beyond are ignored.
        """

    def score_bytes(self, step: Step) -> list[int]:
        """Per row, bytes that `scores` reads, all heads together."""
        return [0] * len(step.starts)


class LongPromptWarning(UserWarning):
    """What an evicting method does with a prompt that its budget has no room for."""


@dataclass(kw_only=True)
class EvictingMethod(Method):
    """Drops tokens from the cache for good. What stays is decided per KV head, or one set for all of a layer's heads,
    but never per query head, whose separate sets would take G times the memory.
    """

    _has_warned = False  # without an annotation, so that it is no option

    def warn_of_prompt(self, tokens: int, budget: int, done: str) -> None:
        """Warn, once per method object, that a prompt of so many tokens meets a smaller budget, and what is done."""
        if not self._has_warned:
            self._has_warned = True
            said = f"{self.name}: a prompt has {tokens} tokens and token_budget is {budget}; {done}"
            warnings.warn(said, LongPromptWarning, stacklevel=2)


@dataclass(frozen=True)
class Eviction:
    """Which residents of some rows stay.

    Attributes:
        rows: the rows in which something is evicted.
        index: int64 ``[len(rows), K, kept]``, ascending; the residents that stay.
        lengths: how many of them count, per row of ``rows``; the rest is padding.
    """

    rows: list[int]
    index: Tensor
    lengths: list[int]


class EvictingState(LayerState, ABC):
    """State of an `EvictingMethod`.

    Attributes:
        per_token: names of the tensors ``rows[name] [B, K, T, ...]`` that have one entry per resident.
        prompts: per row, tokens of the prompt.
        decoded: per row, tokens since then, the current one included.
    """

    per_token: tuple[str, ...] = ()

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self.prompts, self.decoded = [0] * spec.batch, [0] * spec.batch

    def append(self, step: Step) -> None:
        """See `LayerState`. The first tokens of a row are its prompt."""
        for row, (start, count) in enumerate(zip(step.starts, step.counts, strict=True)):
            if start == 0:
                self.prompts[row] = count
                self.saw_prompt(count)
            else:
                self.decoded[row] += count

    def saw_prompt(self, tokens: int) -> None:
        """A prompt of so many tokens has come: the place to warn of one that is longer than the budget."""

    def seen(self, row: int) -> int:
        """Tokens of a row so far, evicted ones included."""
        return self.prompts[row] + self.decoded[row]

    def tokens_read(self, step: Step) -> Sequence[float]:
        """Per row, how many residents `attend` reads, mean over KV heads."""
        return step.ends

    def score_bytes(self, step: Step) -> list[int]:
        """Per row, bytes that a decode step reads beside the keys and values of `tokens_read` tokens, all heads
        together; less than none where it keeps some of these in fewer bytes than the cache would. What an eviction
        reads now and then is not counted.
        """
        return [0] * len(step.starts)

    def attend(self, step: Step) -> Tensor | None:
        """The attention output ``[B, H, D]`` of a decode step, or ``None`` for ordinary attention to all residents."""
        return None

    @abstractmethod
    def most_resident(self) -> int:
        """How many tokens a row may hold at most until the next eviction, once its prompt has been compressed. The
        cache allocates no more than this.
        """

    @abstractmethod
    def keep(self, step: Step) -> Eviction | None:
        """After attention: which residents stay, or ``None`` for all."""

    def moved(self, eviction: Eviction, capacity: int) -> None:
        """Follow the cache, which has just carried out an eviction and has room for ``capacity`` tokens now."""
        for name in self.per_token:
            compact(self.rows[name], eviction)
            self.rows[name] = trimmed(self.rows[name], capacity)

    def select_rows(self, index: Tensor) -> None:
        """See `LayerState`."""
        super().select_rows(index)
        chosen = index.tolist()
        self.prompts = [self.prompts[row] for row in chosen]
        self.decoded = [self.decoded[row] for row in chosen]

    def append_rows(self, other: LayerState) -> None:
        """See `LayerState`."""
        assert isinstance(other, EvictingState)
        super().append_rows(other)
        self.prompts, self.decoded = self.prompts + other.prompts, self.decoded + other.decoded

    def room(self, name: str, tokens: int) -> Tensor:
        """The per-token tensor ``rows[name]``, with at least this many entries; new ones are zero."""
        return self.grown(name, tokens, limit=self.most_resident())


def trimmed(buffer: Tensor, capacity: int) -> Tensor:
    """``buffer [B, K, T, ...]`` with at most ``capacity`` entries, the memory of the others given back."""
    return buffer if buffer.shape[2] <= capacity else buffer[:, :, :capacity].clone()


def compact(buffer: Tensor, eviction: Eviction) -> None:
    """Move what stays to the front of ``buffer [B, K, T, ...]``, in place."""
    rows = torch.tensor(eviction.rows, device=buffer.device)[:, None, None]
    heads = torch.arange(buffer.shape[1], device=buffer.device)[:, None]
    slots = torch.arange(eviction.index.shape[2], device=buffer.device)
    buffer[rows, heads, slots] = buffer[rows, heads, eviction.index]
