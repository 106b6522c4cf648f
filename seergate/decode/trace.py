"""Decoding trace: the blocks that each layer and KV head read at each step, in a Parquet file.

One line per decode step, layer, row of the batch and KV head:

| column | type | meaning |
|---|---|---|
| `step` | int32 | decode steps of this layer before this one, counted from the start of the trace |
| `layer`, `row`, `head` | int32 | which layer, row of the batch and KV head |
| `position` | int32 | index of the decoded token among its row's real tokens |
| `tokens` | float | tokens read |
| `blocks` | list of int32 | the blocks read, ascending; null if the method selected none and read all residents |
| `scores` | list of float | the method's scores of the past blocks, as logits; null in a layer that has none |
| `attention` | list of float | each past block's share of the query's dense attention (`ops.block_targets`) |

The last two columns are null without ``attention``. The file's metadata has JSON under the key `seergate`: `method`
(its configuration), `name`, `nominal` (its budget), `model` and `block_size`.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from seergate.decode.stats import StepRecord
from seergate.errors import SeergateError
from seergate.methods.scoring import log_block_maxima
from seergate.methods.selecting import SelectingState

METADATA_KEY = b"seergate"
LINES_AT_ONCE = 1 << 13


class Trace:
    """Writer of a trace. ``about`` goes into its metadata; the other arguments are those of `Handle.traced`."""

    def __init__(self, path: str | os.PathLike[str], about: dict[str, Any], attention: bool = False) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.attention, self.steps, self.lines = attention, defaultdict[int, int](int), list[dict[str, Any]]()
        whole = ("step", "layer", "row", "head", "position")
        fields = [pa.field(name, pa.int32(), nullable=False) for name in whole]
        fields += [pa.field("tokens", pa.float32(), nullable=False), pa.field("blocks", pa.list_(pa.int32()))]
        fields += [pa.field(name, pa.list_(pa.float32())) for name in ("scores", "attention")]
        self.schema = pa.schema(fields, metadata={METADATA_KEY: json.dumps(about).encode()})
        try:
            self._file = pq.ParquetWriter(os.fspath(path), self.schema, compression="zstd")
        except OSError as error:
            raise SeergateError(f"the trace {Path(path)} cannot be written: {error}") from error

    def record(self, record: StepRecord) -> None:
        """Record one decode step of one layer."""
        step, layer, state, size = record.step, record.cache.layer, record.cache.state, record.cache.block_size
        number, selection = self.steps[layer], record.selection
        self.steps[layer] += 1
        indices_BKN = None if selection is None else selection.indices.numpy(force=True)
        scores_BKN = shares_BKN = None
        if self.attention and isinstance(state, SelectingState):
            scores_BKN = state.logits(step)
        if self.attention:
            shares_BKN = log_block_maxima(step, size)
        for row, (end, total) in enumerate(zip(step.ends, record.total_tokens, strict=True)):
            past = max(0, end - 1) // size
            scores_KN = None if scores_BKN is None else scores_BKN[row, :, :past].float().numpy(force=True)
            shares_KN = None
            if shares_BKN is not None:
                shares_KN = shares_BKN[row, :, :past].softmax(-1).float().numpy(force=True)
            for head in range(step.stored[0].shape[1]):
                if indices_BKN is None:
                    blocks, tokens = None, float(record.read[row])
                else:
                    blocks = indices_BKN[row, head]
                    blocks = blocks[blocks >= 0]
                    # the current block may not be full
                    tokens = len(blocks) * size - (-end % size if len(blocks) else 0)
                self.lines.append(
                    {
                        "step": number,
                        "layer": layer,
                        "row": row,
                        "head": head,
                        "position": total - 1,
                        "tokens": tokens,
                        "blocks": blocks,
                        "scores": None if scores_KN is None else scores_KN[head],
                        "attention": None if shares_KN is None else shares_KN[head],
                    }
                )
        if len(self.lines) >= LINES_AT_ONCE:
            self._flush()

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *error: object) -> None:
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        import pyarrow as pa

        if self.lines:
            self._file.write_table(pa.Table.from_pylist(self.lines, schema=self.schema))
            self.lines = []


def read_trace(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the scalar columns of a trace as arrays, by name, and its metadata.

    Raises:
        SeergateError: if the file cannot be read or is not a trace.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        described = pq.read_schema(os.fspath(path)).metadata or {}
        if METADATA_KEY not in described:
            raise SeergateError(f"{Path(path)} is a Parquet file, and not a trace of decoding")
        table = pq.read_table(os.fspath(path), columns=["step", "layer", "row", "head", "position", "tokens"])
    except (OSError, pa.ArrowInvalid) as error:
        raise SeergateError(f"the trace {Path(path)} cannot be read: {error}") from error
    columns = {name: table[name].to_numpy() for name in table.column_names}
    return columns, json.loads(described[METADATA_KEY])
