"""ReasonCache: similar reasoning blocks share pages of the cache. An optional slice; nothing below knows of it."""
