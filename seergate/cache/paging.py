"""Paging: the backend of caches that keep keys and values in pages."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers import PreTrainedModel

from seergate.cache.pages import CachePages, Paged
from seergate.cache.sharing import BlockSharing, SharedPages
from seergate.cache.storage import KVBackend, Storage
from seergate.checks import check_counts
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
        reason: the method that shares similar pages of a row; `ReasonCache` sets it itself.

    Raises:
        ValueError: for an option out of range.
    """

    tag: ClassVar[str] = "paged"
    block_size: int | None = None
    max_blocks: int | None = None
    reason: ReasonCache | None = field(default=None, repr=False, kw_only=True)
    page: int = field(init=False, repr=False, compare=False)  # tokens per page; set by `bind`
    sharing: BlockSharing | None = field(init=False, repr=False, compare=False)  # set by `bind`

    def __post_init__(self) -> None:
        check_counts(self, optional=True, block_size=1, max_blocks=1)

    @property
    def lossy(self) -> bool:
        return self.reason is not None

    def bind(self, model: PreTrainedModel, method: Method, layers: Sequence[int]) -> KVBackend:
        bound, page = copy.copy(self), page_tokens(method, self.block_size)
        sharing = None if self.reason is None else BlockSharing(model, self.reason)
        vars(bound).update(page=page, sharing=sharing)
        return bound

    def new(self, layer: int, layers: Sequence[Any], static_length: int | None) -> Storage:
        """The layers of a cache share its pages; the first one makes them."""
        for other in layers[:layer]:
            if isinstance(getattr(other, "storage", None), Paged):
                return Paged(other.storage.pages)
        if self.sharing is None:
            return Paged(CachePages(self.page, self.max_blocks))
        return Paged(SharedPages(self.sharing, self.page, self.max_blocks))

    def stats(self) -> dict[str, Any]:
        return {} if self.sharing is None else self.sharing.stats()

    def saving_ratios(self, layers: Sequence[Any]) -> list[float] | None:
        """One minus physical over logical blocks (the paper's memory saving ratio). Blocks shared with forks do not
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
    """Return the paging of a `ReasonCache`. Raises `SeergateError` if the user has ``given`` a storage."""
    if given is not None:
        raise SeergateError(
            f"{reason.name!r} makes its own pages; give block_size and max_blocks to the method itself and leave "
            f"storage={given!r} out"
        )
    return Paging(reason.block_size, reason.max_blocks, reason=reason)
