"""A decode step whose shapes and branches do not depend on lengths: what a compiler or a CUDA graph can replay."""

from __future__ import annotations

from seergate.methods.base import Step


class FixedStep(Step):
    """One token per row on a static cache. The host does not know the rows' lengths: ``starts`` and ``counts`` are
    empty, and a method goes by ``lengths`` alone.
    """

    @property
    def max_length(self) -> int:
        """Tokens that a row may have at most: the cache's capacity."""
        return self.keys_BKCD.shape[2]

    @property
    def host_lengths(self) -> list[int] | None:
        """See `Step`."""
        return None
