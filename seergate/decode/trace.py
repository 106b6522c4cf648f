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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
        self._batches, self._lines = list[Any](), 0

    def record(self, record: StepRecord) -> None:
        """Record one decode step of one layer."""
        import pyarrow as pa

        layer, step, selection, size = record.layer, record.step, record.selection, record.block_size
        number = self.steps[layer]
        self.steps[layer] += 1
        if number % self.every:
            return
        rows, heads = len(record.total_tokens), step.stored[0].shape[1]
        if selection is None:
            tokens = np.repeat(np.asarray(record.read, np.float32), heads)
            blocks = pa.nulls(rows * heads, self.schema.field("blocks").type)
        else:
            indices = selection.indices.numpy(force=True).reshape(rows * heads, -1)
            chosen = indices >= 0
            counts = chosen.sum(1)
            missing = np.repeat([-end % size for end in step.ends], heads)  # the current block may not be full
            tokens = counts * size - np.where(counts, missing, 0)
            blocks = _lists(counts, indices[chosen].astype(np.int32))
        places = np.repeat(np.arange(rows), heads), np.tile(np.arange(heads), rows)
        positions = np.repeat(np.asarray(record.total_tokens) - 1, heads)
        whole = np.full(rows * heads, number), np.full(rows * heads, layer), *places, positions
        columns = [pa.array(values.astype(np.int32)) for values in whole]
        columns += [pa.array(tokens.astype(np.float32)), blocks, *self._weights(record, rows * heads)]
        self._batches.append(pa.record_batch(columns, schema=self.schema))
        self._lines += rows * heads
        if self._lines >= LINES_AT_ONCE:
            self._flush()

    def _weights(self, record: StepRecord, lines: int) -> tuple[Any, Any]:
        """The columns ``scores`` and ``attention``."""
        import pyarrow as pa

        step, size = record.step, record.block_size
        past = [(end - 1) // size for end in step.ends]

        def column(values_BKN: Tensor, finish: Callable[[Tensor], Tensor]) -> Any:
            rows = [finish(values_KN[:, :count]) for values_KN, count in zip(values_BKN, past, strict=True)]
            counts = np.repeat(past, values_BKN.shape[1])
            return _lists(counts, torch.cat([row.float().reshape(-1) for row in rows]).numpy(force=True))

        scores = attention = pa.nulls(lines, self.schema.field("scores").type)
        if self.attention:
            attention = column(log_block_maxima(step, size), lambda maxima_KN: maxima_KN.softmax(-1))
            if isinstance(record.state, SelectingState):
                scores = column(record.state.logits(step), lambda logits_KN: logits_KN)
        return scores, attention

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *error: object) -> None:
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._batches:
            self._file.write_table(pa.Table.from_batches(self._batches, self.schema).combine_chunks())
            self._batches, self._lines = [], 0


def _lists(counts: np.ndarray, values: np.ndarray) -> Any:
    """A column of lists with these lengths, whose values follow each other."""
    import pyarrow as pa

    return pa.ListArray.from_arrays(pa.array(np.append(0, counts.cumsum()).astype(np.int32)), pa.array(values))


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
