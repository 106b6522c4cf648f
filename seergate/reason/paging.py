"""Paging: the user's side of paged caches, and what makes their storages under a handle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar

from transformers import PreTrainedModel

from seergate.cache.storage import KVBackend, Storage, StorageFactory
from seergate.errors import SeergateError
from seergate.methods.base import Method
from seergate.reason.method import ReasonCache
from seergate.reason.paged import BlockStore, CachePages, Paged, page_tokens
from seergate.reason.sharing import BlockSharing


@dataclass(frozen=True)
class Paging(KVBackend):
    """Keep keys and values in pages instead of one buffer per layer.

    Attributes:
        block_size: tokens per page, a multiple of the method's block size; the method's own, or 16, if ``None``.
        max_blocks: how many pages a cache may have, all rows together; ``None`` for no limit. Reaching it raises
            `OutOfBlocks`.
        share_prefixes: let rows whose prompts begin with the same tokens share the pages of that beginning, once the
            prompt has been read; only pages that are equal to the last bit.
    """

    tag: ClassVar[str] = "paged"
    called: ClassVar[str] = "a paged"
    block_size: int | None = None
    max_blocks: int | None = None
    share_prefixes: bool = False

    def factory(self, model: PreTrainedModel, method: Method, layers: Sequence[int]) -> StorageFactory:
        return PagedStorageFactory(self, model, method)

    def page_of(self, method: Method) -> int:
        """Tokens per page under a method.

        Raises:
            SeergateError: if pages would cut a block.
        """
        return page_tokens(method, self.block_size, self.max_blocks)


@dataclass(frozen=True)
class SimilarPaging(Paging):
    """Paging under `ReasonCache`, which lets similar pages of a row share memory."""

    reason: ReasonCache | None = None

    def factory(self, model: PreTrainedModel, method: Method, layers: Sequence[int]) -> StorageFactory:
        return PagedStorageFactory(self, model, method, self.reason)


def paging_of(reason: ReasonCache, given: KVBackend | None) -> Paging:
    """The paging that `ReasonCache` brings."""
    if given is not None and not isinstance(given, Paging):
        raise SeergateError(f"{reason.name!r} shares pages; leave storage={given!r} out")
    if given is not None and (given.block_size is not None or given.max_blocks is not None):
        raise SeergateError(f"give block_size and max_blocks to {reason.name!r} itself, not to its paging")
    prefixes = given is not None and given.share_prefixes
    return SimilarPaging(reason.block_size, reason.max_blocks, prefixes, reason)


class PagedStorageFactory(StorageFactory):
    """Makes the storages of paged caches.

    Attributes:
        sharing: what shares pages, if anything does.
    """

    def __init__(
        self, paging: Paging, model: PreTrainedModel, method: Method, reason: ReasonCache | None = None
    ) -> None:
        self.lossy = reason is not None
        self._limit, self._page, self._numbers = paging.max_blocks, paging.page_of(method), count()
        shares = reason is not None or paging.share_prefixes
        self.sharing = BlockSharing(model, reason, paging.share_prefixes) if shares else None

    def new(self, layer: int, layers: Sequence[Any], static_length: int | None) -> Storage:
        """The layers of a cache share its pages; the first one makes them."""
        for other in layers[:layer]:
            if isinstance(getattr(other, "storage", None), Paged):
                return Paged(other.storage.pages)
        pages = CachePages(BlockStore(self._page, self._limit, self._numbers))
        if self.sharing is not None:
            self.sharing.follow(pages)
        return Paged(pages)

    def stats(self) -> dict[str, Any]:
        return {} if self.sharing is None else self.sharing.stats()

    def saving_ratios(self, layers: Sequence[Any]) -> list[float] | None:
        """One minus physical over logical blocks (the paper's memory saving ratio). Blocks that are shared with other
        rows do not count.
        """
        storages = (getattr(layer, "storage", None) for layer in layers)
        pages = next((storage.pages for storage in storages if isinstance(storage, Paged)), None)
        if pages is None or not self.lossy:
            return None
        return [row.repeats / max(1, len(row.table)) for row in pages.store.rows]

    def reset(self) -> None:
        if self.sharing is not None:
            self.sharing.reset()

    def remove(self) -> None:
        if self.sharing is not None:
            self.sharing.remove()
