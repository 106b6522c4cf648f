"""ReasonCache: similar reasoning blocks share pages of the cache. An optional package: no other one imports it."""
