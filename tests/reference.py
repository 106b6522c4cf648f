"""The public ops, run by `seergate.ops.reference`: `reference.gate_kl` has the arguments of `ops.gate_kl`.

They are taken from their files, so that a test may put a wrong op into `seergate.ops`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any
from unittest.mock import patch

from seergate.ops import attention, compression, decode, selection
from seergate.ops.gate_kl import gate_kl
from seergate.ops.retention_kl import retention_kl
from seergate.ops.scorer_kl import scorer_kl


def by_reference(op: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(op)
    def run(*args: Any, **options: Any) -> Any:
        with patch.dict(os.environ, SEERGATE_BACKEND="reference"):
            return op(*args, **options)

    return run


attention_with_block_targets = by_reference(attention.attention_with_block_targets)
block_targets = by_reference(attention.block_targets)
dense_decode = by_reference(decode.dense_decode)
gate_kl = by_reference(gate_kl)
packed_attention = by_reference(attention.packed_attention)
pool_keys = by_reference(compression.pool_keys)
retained_attention = by_reference(attention.retained_attention)
retention_kl = by_reference(retention_kl)
score_blocks = by_reference(selection.score_blocks)
scorer_kl = by_reference(scorer_kl)
select_blocks = by_reference(selection.select_blocks)
sparse_decode = by_reference(decode.sparse_decode)
update_compressed_keys = by_reference(compression.update_compressed_keys)
