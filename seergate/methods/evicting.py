"""Base classes of evicting methods and of their states; evictions are per row and KV head.

Shape suffixes: see `seergate.methods.base`.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from seergate.checks import check, check_choice, check_counts
from seergate.errors import SeergateError
from seergate.methods.base import AttentionOutput, LayerSpec, LayerState, Method, Step
from seergate.ops.gate_math import wide_dtype
from seergate.ops.rows import RowLengths


class LongPromptWarning(UserWarning):
    """A prompt exceeds the budget of an evicting method."""


@dataclass(kw_only=True)
class CompressingMethod(Method):
    """Moves tokens out of the cache: drops them (`EvictingMethod`), or stores them smaller in its state (`KV4Bit`).

    A method whose states can read a prompt in several steps, the last of which may be a single token, sets
    ``chunked_prefill``; `CompressingState.select_kept` is called after the last.
    """

    chunked_prefill = False


@dataclass(kw_only=True)
class EvictingMethod(CompressingMethod):
    """Evicts tokens from the cache for good. One set of residents is kept per KV head, or per layer for all heads, but
    never per query head, as separate sets would take G times the memory.
    """

    _has_warned = False  # no annotation, so not an option

    def warn_of_prompt(self, tokens: int) -> None:
        """Warn, once per method object, of a prompt that exceeds ``token_budget``, if the method has one."""
        budget = getattr(self, "token_budget", None)
        if budget is not None and tokens > budget and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self.name}: a prompt has {tokens} tokens and token_budget is {budget}; docs/which_method.md says "
                "what becomes of it",
                LongPromptWarning,
                stacklevel=2,
            )


@dataclass(frozen=True)
class Eviction:
    """The residents that stay, in the rows that evict.

    Attributes:
        rows: the rows in which something is evicted.
        index: int64 ``[len(rows), K, kept]``, ascending; the residents that stay.
        lengths: per row of ``rows``, the number of valid entries in ``index``; the rest is padding.
        shared: the lengths of the step, with which its layers share `scatter_index`; ``None`` to make it for this one.
    """

    rows: list[int]
    index: Tensor
    lengths: list[int]
    shared: RowLengths | None = None

    @cached_property
    def scatter_index(self) -> tuple[Tensor, Tensor, Tensor]:
        """Index of each row, head and front slot, which broadcast to ``index``."""
        (_, heads, kept), device = self.index.shape, self.index.device

        def make() -> tuple[Tensor, Tensor, Tensor]:
            rows = torch.tensor(self.rows, device=device)[:, None, None]
            return rows, torch.arange(heads, device=device)[:, None], torch.arange(kept, device=device)

        return make() if self.shared is None else self.shared.once(("scatter_index", *self.rows, heads, kept), make)


class CompressingState(LayerState, ABC):
    """State of a `CompressingMethod`. Residents are the tokens that the cache still holds.

    Attributes:
        prompts: prompt tokens of each row.
        decoded: tokens of each row since then, the current one included.
    """

    def __init__(self, spec: LayerSpec, method: Method) -> None:
        super().__init__(spec, method)
        self.prompts, self.decoded = [0] * spec.batch, [0] * spec.batch

    def covered(self, held: Any, seen: Any) -> Any:
        return held

    def append(self, step: Step) -> None:
        """Count the new tokens; the first tokens of a row are its prompt, which may come in chunks."""
        for row, (start, count) in enumerate(zip(step.starts, step.counts, strict=True)):
            if start == 0 or not step.decoded:
                self.prompts[row] = start + count
            else:
                self.decoded[row] += count

    def total_tokens(self, row: int) -> int:
        """Tokens of a row so far, evicted ones included."""
        return self.prompts[row] + self.decoded[row]

    def observe_attention(self, step: Step) -> None:
        """Called at each decode step before attention; override it to record what eviction needs."""

    def attend(self, step: Step) -> AttentionOutput | None:
        """Return the attention of a decode step, or ``None`` for ordinary attention to all residents."""
        return None

    @property
    def compresses_once(self) -> bool:
        """True if only the prompt is compressed, so that a row grows beyond `max_resident` afterwards."""
        return False

    @abstractmethod
    def max_resident(self) -> int:
        """Maximum tokens of a row until the next eviction, once its prompt has been compressed. The cache allocates no
        more than this.
        """

    @abstractmethod
    def select_kept(self, step: Step) -> Eviction | None:
        """Called after attention: return the residents that stay, or ``None`` to evict nothing."""

    def on_evict(self, eviction: Eviction, capacity: int) -> None:
        """Update the state after an eviction, which left the cache with room for ``capacity`` tokens."""

    def select_rows(self, index: Tensor) -> None:
        super().select_rows(index)
        chosen = index.tolist()
        self.prompts = [self.prompts[row] for row in chosen]
        self.decoded = [self.decoded[row] for row in chosen]

    def append_rows(self, other: LayerState) -> None:
        assert isinstance(other, CompressingState)
        super().append_rows(other)
        self.prompts, self.decoded = self.prompts + other.prompts, self.decoded + other.decoded


class EvictingState(CompressingState):
    """State of an `EvictingMethod`. Entries of its growing tensors are evicted with their residents."""

    method: EvictingMethod
    per_token: tuple[str, ...] = ()  # names given to `add_per_token`

    def append(self, step: Step) -> None:
        super().append(step)
        if not any(self.decoded):
            self.method.warn_of_prompt(max(self.prompts))
        for name in self.per_token:
            self.grown(name, step.max_length, limit=self.max_resident())

    def on_evict(self, eviction: Eviction, capacity: int) -> None:
        for name, size in self.tokens_per_entry.items():
            thinned = eviction if size == 1 else replace(eviction, index=eviction.index[..., ::size] // size)
            compact(self.rows[name], thinned)
            self.rows[name] = trimmed(self.rows[name], -(-capacity // size))

    def add_per_token(self, name: str, dtype: torch.dtype) -> None:
        """Add a tensor of one number per resident and KV head, ``rows[name] [B, K, T]``; `append` adds zeros."""
        self.per_token = (*self.per_token, name)
        spec, self.tokens_per_entry[name] = self.spec, 1
        self.rows[name] = torch.zeros(spec.batch, spec.num_kv_heads, 0, dtype=dtype, device=spec.device)

    def add_positions(self, step: Step) -> None:
        """Store in ``rows["position"]`` the position of each new token in its row; call it after `append`."""
        positions = self.rows["position"]
        for row, (start, count) in enumerate(zip(step.starts, step.counts, strict=True)):
            seen = self.total_tokens(row)
            positions[row, :, start : start + count] = torch.arange(seen - count, seen, device=positions.device)

    def keep_best(self, step: Step, counts: dict[int, int], scores: Callable[[list[int]], Tensor]) -> Eviction | None:
        """Keep the ``counts[row]`` best residents in each row of ``counts``; ``None`` if that is empty.
        ``scores(rows)``: ``[R, K, T]`` or, for one decision for all heads, ``[R, 1, T]``, as made by `stacked`.
        """
        if not counts:
            return None
        rows, kept = list(counts), list(counts.values())
        index = best(scores(rows), kept)
        if index.shape[1] < self.spec.num_kv_heads:
            index = index.expand(-1, self.spec.num_kv_heads, -1)
        return Eviction(rows, index, kept, step.rows)


def trimmed(buffer: Tensor, capacity: int) -> Tensor:
    """Cut ``buffer [B, K, T, ...]`` to at most ``capacity`` entries, and release the memory of the others."""
    return buffer if buffer.shape[2] <= capacity else buffer[:, :, :capacity].clone()


def compact(buffer: Tensor, eviction: Eviction) -> None:
    """Move the entries that stay to the front of ``buffer [B, K, T, ...]``, in place."""
    rows, heads, slots = eviction.scatter_index
    buffer.index_put_((rows, heads, slots), buffer[rows, heads, eviction.index])


def stacked(scores: list[Tensor]) -> Tensor:
    """The scores ``[K, T]`` of rows of several lengths as ``[R, K, T]``, minus infinity beyond a row's length."""
    longest = max(scores_KT.shape[1] for scores_KT in scores)
    return torch.stack([pad(scores_KT, (0, longest - scores_KT.shape[1]), value=-torch.inf) for scores_KT in scores])


PROMPT = ("evictable", "pinned", "extra")


@dataclass(kw_only=True)
class BudgetedMethod(EvictingMethod):
    """Keeps the ``token_budget`` residents of each row and KV head that score best.

    Between two evictions the cache grows by ``interval`` tokens, so at most ``token_budget + interval`` are resident
    once a prompt has been compressed. Of equal scores the newer token stays.

    Attributes:
        token_budget: tokens that are kept at an eviction.
        interval: tokens between evictions.
        prompt: ``"evictable"``: prompt tokens compete like all others, and a prompt longer than the budget is
            compressed at once. ``"pinned"``: prompt tokens stay and count in the budget; generated tokens get at least
            ``interval`` tokens (or the recent tokens that always stay, if more), beyond the budget if necessary.
            ``"extra"``: prompt tokens stay and do not count in the budget.
    """

    token_budget: int = 1024
    interval: int = 1
    prompt: str = "evictable"

    periodic: ClassVar[bool] = False
    """True if evictions happen at decode steps that are multiples of ``interval``, rather than once ``interval``
    tokens exceed the budget."""

    recent_option: ClassVar[str | None] = None
    """The option that is the number of the newest tokens that always stay; it must fit into the budget."""

    def __post_init__(self) -> None:
        check_counts(self, token_budget=1, interval=1)
        check_choice(self, prompt=PROMPT)
        if option := self.recent_option:
            check_counts(self, optional=self.__dataclass_fields__[option].default is None, **{option: 0})
            fits = self.token_budget >= self.recent
            check("token_budget", self.token_budget, fits, f"at least {option} ({self.recent})")

    @property
    def recent(self) -> int:
        """Number of the newest tokens that always stay."""
        return int(getattr(self, self.recent_option)) if self.recent_option else 0

    def kept(self, prompt_tokens: int) -> int:
        """Residents of a row after an eviction."""
        if self.prompt == "evictable":
            return self.token_budget
        if self.prompt == "extra":
            return prompt_tokens + self.token_budget
        return max(self.token_budget, prompt_tokens + max(self.interval, self.recent))


class BudgetedState(EvictingState):
    """State of a `BudgetedMethod`; a subclass scores residents by `importance`."""

    method: BudgetedMethod

    @abstractmethod
    def importance(self, step: Step, row: int) -> Tensor:
        """Scores of a row's residents, ``[K, T]`` or, for one decision for all heads, ``[1, T]``; the highest stay.
        Called when the row evicts. Scores of tokens that always stay are ignored; NaN counts as the lowest score.
        """

    def importances(self, step: Step, rows: list[int]) -> Tensor:
        """`importance` of the rows that evict, ``[R, K, T]`` or ``[R, 1, T]``; what is beyond a row's length is
        ignored. Override it to compute all rows at once.
        """
        scores = [self.importance(step, row) for row in rows]
        for row, scores_KT in zip(rows, scores, strict=True):
            shape = list(scores_KT.shape) if isinstance(scores_KT, Tensor) else type(scores_KT).__name__
            if shape not in ([1, step.ends[row]], [self.spec.num_kv_heads, step.ends[row]]):
                raise SeergateError(
                    f"{type(self).__name__}.importance returned {shape}; it must return [{self.spec.num_kv_heads} or "
                    f"1, {step.ends[row]}], a score for each resident of the row"
                )
        return stacked(scores)

    @staticmethod
    def of_rows(x: Tensor, step: Step, rows: list[int]) -> Tensor:
        """The part of ``x [B, ...]`` that belongs to these rows, ``x`` itself if they are all."""
        if len(rows) == len(x):
            return x
        return x.index_select(0, step.rows.once(("rows", *rows), lambda: torch.tensor(rows, device=x.device)))

    def max_resident(self) -> int:
        return max(self.method.kept(prompt) for prompt in self.prompts) + self.method.interval

    def clock(self, row: int) -> int:
        """Step count of a row; a periodic method evicts at multiples of ``interval``."""
        return self.decoded[row]

    def due(self, row: int, held: int) -> bool:
        """True if a row of ``held`` residents evicts now."""
        method, decoded = self.method, self.decoded[row]
        capacity = method.kept(self.prompts[row])
        if method.periodic and decoded:
            return self.clock(row) % method.interval == 0 and held > capacity
        return held > capacity and (decoded == 0 or held >= capacity + method.interval)

    def select_kept(self, step: Step) -> Eviction | None:
        ends, method = step.ends, self.method

        def scores(rows: list[int]) -> Tensor:
            scores_RKT = self.importances(step, rows)
            # infinity marks what always stays, and minus infinity what is no token
            scores_RKT = scores_RKT.to(wide_dtype(scores_RKT.dtype))
            scores_RKT = scores_RKT.nan_to_num(torch.finfo(scores_RKT.dtype).min)
            parts = [(0 if method.prompt == "evictable" else self.prompts[row], ends[row]) for row in rows]

            def limits() -> tuple[Tensor, Tensor]:
                pinned, end = torch.tensor(parts, device=step.lengths.device).T[..., None, None]
                slots = torch.arange(scores_RKT.shape[2], device=step.lengths.device)
                ranked = (slots >= pinned) & (slots < end - method.recent)
                return ranked, torch.where(slots < end, torch.inf, -torch.inf)

            ranked, others = step.rows.once(("ranked", *parts, method.recent, scores_RKT.shape[2]), limits)
            return torch.where(ranked, scores_RKT, others)

        due = {row: method.kept(self.prompts[row]) for row, end in enumerate(ends) if self.due(row, end)}
        return self.keep_best(step, due, scores)


def best(scores_RKT: Tensor, counts: list[int]) -> Tensor:
    """Ascending indices of the ``counts[r]`` highest scores of each row; of equal scores, the newer ones.

    Returns:
        int64 ``[R, K, max(counts)]``, padded with the last index.
    """
    total, width = scores_RKT.shape[-1], max(counts)
    # a stable sort: of equals the newer comes last, whatever else is in the batch
    index = scores_RKT.sort(dim=-1, stable=True).indices[..., total - width :]
    if min(counts) == width:
        return index.sort(-1).values
    left_out = torch.arange(width, 0, -1, device=index.device) > torch.tensor(counts, device=index.device)[:, None]
    return index.masked_fill(left_out[:, None], total).sort(-1).values.clamp(max=total - 1)
