"""Table of refused combinations of storage, method, correction and model, with reasons.

Tags describe the combined parts; error messages name them. Parts with both tags of a pair in `REFUSED` are refused.

| axis | tags |
|---|---|
| storage | `paged`, `offloaded`, `static`; none of these for a dynamic cache |
| method | `selecting`, `evicting`, `dense` (reads all it keeps); `moves keys` if it re-positions them; |
| | `query heads apart` if the query heads of a group read different blocks |
| correction | `rectified`; `rectified past a block` |
| model | `one-way layers`, `one-way cache` (not croppable); `own rope` (not one of the common forms); |
| | `shared keys` if later layers read the keys and values of a gated layer |
"""

from __future__ import annotations

from seergate.errors import SeergateError

_GROWS = "a cache that is {0} grows by itself; use a dynamic cache, not a static one"

REFUSED: dict[tuple[str, str], str] = {
    ("paged", "static"): _GROWS,
    ("offloaded", "static"): _GROWS,
    ("paged", "evicting"): "{1} evicts tokens, and a paged cache keeps all; leave storage= out",
    ("offloaded", "evicting"): "{1} cannot be offloaded: only a method that selects blocks leaves some of them unread",
    ("offloaded", "dense"): "{1} cannot be offloaded: only a method that selects blocks leaves some of them unread",
    ("offloaded", "rectified"): "{1} reads the whole cache in dense passes; leave storage= out",
    ("offloaded", "query heads apart"): "{1} cannot be offloaded: blocks are fetched for each KV head",
    ("paged", "rectified"): "{1} needs an ordinary cache; leave storage= out",
    ("evicting", "rectified"): "{0} evicts, and {1} needs all tokens; leave the correction out",
    (
        "evicting",
        "shared keys",
    ): "{0} takes tokens out of the cache that later layers of this {1} model read; use a method that selects blocks",
    ("dense", "rectified"): "{0} reads everything it keeps, so there is nothing that {1} could correct; leave it out",
    (
        "rectified",
        "one-way layers",
    ): "{0} removes cached tokens, which {1} does not support; decode this model without it",
    ("rectified", "one-way cache"): "{0} removes cached tokens, which {1} does not support; use a dynamic cache",
    ("moves keys", "own rope"): (
        "the method {0} re-positions keys, which {1} models do not allow: their RoPE has a form of its own"
    ),
    ("rectified past a block", "own rope"): (
        "{0} has to recover keys before RoPE, which {1} models do not allow: their RoPE has a form of its own; "
        "rectify at least once a block"
    ),
}


def refuse(tags: dict[str, str]) -> None:
    """Raise `SeergateError` for the first refused pair of tags; ``tags`` maps each tag to a name for the message."""
    for (one, other), why in REFUSED.items():
        if one in tags and other in tags:
            raise SeergateError(why.format(tags[one], tags[other]))
