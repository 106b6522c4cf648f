"""Paging: the backend of caches that keep keys and values in pages."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar

from transformers import PreTrainedModel

from seergate.cache.pages import BlockStore, CachePages, Paged
from seergate.cache.sharing import BlockSharing, SharedPages
from seergate.cache.storage import KVBackend, Storage
from seergate.errors import SeergateError
from seergate.methods.base import Method
from seergate.methods.reason_cache.method import ReasonCache
from seergate.methods.selecting import page_tokens


@dataclass(frozen=True)
class Paging(KVBackend):
    """Keep keys and values in pages instead of one buffer per layer.

    Attributes:
        block_size: tokens per page, a multiple of the method's block size; ``None`` takes the method's, or 16.
        max_blocks: maximum number of pages of a cache, all rows together; ``None`` for no limit. Reaching it raises
            `OutOfBlocks`.
        share_prefixes: whether rows whose prompts begin with the same tokens share the pages of this prefix after
            prefill; only pages that are equal to the last bit.
        reason: the method that shares similar pages of a row; `ReasonCache` sets it itself.
    """

    tag: ClassVar[str] = "paged"
    called: ClassVar[str] = "a paged"
    block_size: int | None = None
    max_blocks: int | None = None
    share_prefixes: bool = False
    reason: ReasonCache | None = field(default=None, repr=False)
    page: int = field(init=False, repr=False, compare=False)  # tokens per page; set by `bind`
    numbers: Iterator[int] = field(init=False, repr=False, compare=False)  # of blocks and rows; set by `bind`
    sharing: BlockSharing | None = field(init=False, repr=False, compare=False)  # set by `bind`

    @property
    def lossy(self) -> bool:
        return self.reason is not None

    def bind(self, model: PreTrainedModel, method: Method, layers: Sequence[int]) -> KVBackend:
        bound, page = copy.copy(self), page_tokens(method, self.block_size)
        BlockStore(page, self.max_blocks)  # checks the limit
        shares = self.lossy or self.share_prefixes
        sharing = BlockSharing(model, self.reason, self.share_prefixes) if shares else None
        vars(bound).update(page=page, numbers=count(), sharing=sharing)
        return bound

    def new(self, layer: int, layers: Sequence[Any], static_length: int | None) -> Storage:
        """The layers of a cache share its pages; the first one makes them."""
        for other in layers[:layer]:
            if isinstance(getattr(other, "storage", None), Paged):
                return Paged(other.storage.pages)
        tables = self.page, self.max_blocks, self.numbers
        return Paged(CachePages(*tables) if self.sharing is None else SharedPages(self.sharing, *tables))

    def stats(self) -> dict[str, Any]:
        return {} if self.sharing is None else self.sharing.stats()

    def saving_ratios(self, layers: Sequence[Any]) -> list[float] | None:
        """One minus physical over logical blocks (the paper's memory saving ratio). Sharing with other rows does not
        count as saving.
        """
        storages = (getattr(layer, "storage", None) for layer in layers)
        pages = next((storage.pages for storage in storages if isinstance(storage, Paged)), None)
        if pages is None or not self.lossy:
            return None
        return [row.repeats / max(1, len(row.table)) for row in pages.rows]

    def reset(self) -> None:
        if self.sharing is not None:
            self.sharing.reset()

    def remove(self) -> None:
        if self.sharing is not None:
            self.sharing.remove()


def paging_of(reason: ReasonCache, given: KVBackend | None) -> Paging:
    """Return the paging of a `ReasonCache`; ``given``, the user's own, may set ``share_prefixes`` only."""
    if given is not None and not isinstance(given, Paging):
        raise SeergateError(f"{reason.name!r} shares pages; leave storage={given!r} out")
    if given is not None and (given.block_size is not None or given.max_blocks is not None):
        raise SeergateError(f"give block_size and max_blocks to {reason.name!r} itself, not to its paging")
    prefixes = given is not None and given.share_prefixes
    return Paging(reason.block_size, reason.max_blocks, prefixes, reason)
