"""Pager: makes the layers of a handle's caches paged, with sharing where it was asked for."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from transformers import PreTrainedModel

from seergate.cache.layer import GatedLayer
from seergate.errors import SeergateError
from seergate.methods.base import Method
from seergate.reason.method import ReasonCache
from seergate.reason.paged import BlockStore
from seergate.reason.paged_layer import CachePages, PagedLayer, Paging
from seergate.reason.sharing import Sharing


class Pager:
    """See the module's docstring.

    Args:
        model: the model.
        method: what is attached; `ReasonCache` brings its own paging.
        paging: how, for other methods.

    Attributes:
        method: what decides what is read.
        sharing: what shares blocks, if anything does.

    Raises:
        SeergateError: for options that do not go together.
    """

    def __init__(self, model: PreTrainedModel, method: Method, paging: Paging | None) -> None:
        reason = method if isinstance(method, ReasonCache) else None
        self.method = method if reason is None else reason.reading
        paging = Paging() if paging is None else paging
        if reason is not None:
            if paging.block_size is not None or paging.max_blocks is not None:
                raise SeergateError(f"give block_size and max_blocks to {reason.name!r} itself, not to its paging")
            paging = Paging(reason.block_size, reason.max_blocks, paging.share_prefixes)
        self._paging, self._page = paging, paging.page_of(self.method)
        self._numbers = count()
        self.sharing: Sharing | None = None
        if reason is not None or paging.share_prefixes:
            self.sharing = Sharing(model, reason, paging.share_prefixes)

    def layer_class(self, first: Any) -> Callable[..., GatedLayer]:
        """What makes a layer of a cache.

        Args:
            first: the cache's first gated layer if that is another one, with which the new one then shares its
                tables.
        """
        if isinstance(first, PagedLayer):
            pages = first.pages
        else:
            pages = CachePages(BlockStore(self._page, self._paging.max_blocks, self._numbers))
            if self.sharing is not None:
                self.sharing.follow(pages)
        return lambda *args, **kwargs: PagedLayer(pages, *args, **kwargs)

    def stats(self) -> dict[str, Any]:
        """What was shared."""
        return {} if self.sharing is None else self.sharing.stats()

    def reset(self) -> None:
        """Start counting anew."""
        if self.sharing is not None:
            self.sharing.reset()

    def remove(self) -> None:
        """Share no more."""
        if self.sharing is not None:
            self.sharing.remove()
