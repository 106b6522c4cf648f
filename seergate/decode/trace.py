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
(its configuration), `name`, `nominal` (its budget), `model`, `block_size` and `every`.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from seergate.checks import check, is_int
from seergate.errors import SeergateError
from seergate.methods.scoring import log_block_maxima
from seergate.methods.selecting import SelectingState
from seergate.stats import StepRecord

METADATA_KEY = b"seergate"
LINES_AT_ONCE = 1 << 13


class Trace:
    """Writer of a trace. ``about`` goes into its metadata; the other arguments are those of `Handle.traced`."""

    def __init__(
        self, path: str | os.PathLike[str], about: dict[str, Any], every: int = 1, attention: bool = False
    ) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        check("every", every, is_int(every) and every >= 1, "a positive whole number of steps")
        self.every, self.attention, self.steps = every, attention, defaultdict[int, int](int)
        whole = ("step", "layer", "row", "head", "position")
        fields = [pa.field(name, pa.int32(), nullable=False) for name in whole]
        fields += [pa.field("tokens", pa.float32(), nullable=False), pa.field("blocks", pa.list_(pa.int32()))]
        fields += [pa.field(name, pa.list_(pa.float32())) for name in ("scores", "attention")]
        described = {METADATA_KEY: json.dumps({**about, "every": every}).encode()}
        self.schema = pa.schema(fields, metadata=described)
        try:
            self._file = pq.ParquetWriter(os.fspath(path), self.schema, compression="zstd")
        except OSError as error:
            raise SeergateError(f"the trace {Path(path)} cannot be written: {error}") from error
        self._lines: list[dict[str, Any]] = []

    def record(self, record: StepRecord) -> None:
        """Record one decode step of one layer."""
        layer, step, state, size = record.layer, record.step, record.state, record.block_size
        number = self.steps[layer]
        self.steps[layer] += 1
        if number % self.every:
            return
        indices = None if record.selection is None else record.selection.indices.tolist()
        logits_BKN = state.logits(step) if self.attention and isinstance(state, SelectingState) else None
        maxima_BKN = log_block_maxima(step, size) if self.attention else None
        for row, (end, total) in enumerate(zip(step.ends, record.total_tokens, strict=True)):
            past = slice((end - 1) // size)
            scores = None if logits_BKN is None else logits_BKN[row, :, past].float().tolist()
            attention = None if maxima_BKN is None else maxima_BKN[row, :, past].softmax(-1).float().tolist()
            for head in range(step.stored[0].shape[1]):
                blocks = None if indices is None else [block for block in indices[row][head] if block >= 0]
                if blocks is None:
                    tokens = record.read[row]
                else:  # the current block may not be full
                    tokens = len(blocks) * size - (-end % size if blocks else 0)
                place = {"step": number, "layer": layer, "row": row, "head": head, "position": total - 1}
                weights = {"scores": scores and scores[head], "attention": attention and attention[head]}
                self._lines.append({**place, "tokens": float(tokens), "blocks": blocks, **weights})
        if len(self._lines) >= LINES_AT_ONCE:
            self._flush()

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *error: object) -> None:
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._lines:
            self._file.write_table(pa.Table.from_pylist(self._lines, self.schema))
            self._lines.clear()


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
