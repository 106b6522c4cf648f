"""ReasonCache: similar reasoning blocks share pages of the cache."""
