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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from seergate.checks import check, is_int
from seergate.decode.stats import StepRecord
from seergate.errors import SeergateError
from seergate.methods.scoring import log_block_maxima
from seergate.methods.selecting import SelectingState

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
        self._places, self._tokens = list[tuple[int, ...]](), list[float]()
        self._lists = _Lists(np.int32), _Lists(np.float32), _Lists(np.float32)

    def record(self, record: StepRecord) -> None:
        """Record one decode step of one layer."""
        step, layer, state, size = record.step, record.cache.layer, record.cache.state, record.cache.block_size
        number = self.steps[layer]
        self.steps[layer] += 1
        if number % self.every:
            return
        heads, blocks, scores, attention = step.stored[0].shape[1], *self._lists
        ends = [end for end in step.ends for _ in range(heads)]
        for row, total in enumerate(record.total_tokens):
            self._places += [(number, layer, row, head, total - 1) for head in range(heads)]
        if record.selection is None:
            blocks.add_nulls(len(ends))
            self._tokens += [float(read) for read in record.read for _ in range(heads)]
        else:
            indices = record.selection.indices.numpy(force=True).reshape(len(ends), -1)
            chosen = indices >= 0
            counts = chosen.sum(1).tolist()
            blocks.add(counts, indices[chosen])
            # the current block may not be full
            self._tokens += [n * size - (-end % size if n else 0) for n, end in zip(counts, ends, strict=True)]
        past = [(end - 1) // size for end in step.ends]
        for lists, values_BKN, finish in (
            (scores, self.attention and isinstance(state, SelectingState) and state.logits(step), Tensor.float),
            (attention, self.attention and log_block_maxima(step, size), lambda x_KN: x_KN.softmax(-1).float()),
        ):
            if values_BKN is False:
                lists.add_nulls(len(ends))
                continue
            for values_KN, count in zip(values_BKN, past, strict=True):
                shares_KN = finish(values_KN[:, :count]).numpy(force=True)
                lists.add([shares_KN.shape[1]] * heads, shares_KN.ravel())
        if len(self._places) >= LINES_AT_ONCE:
            self._flush()

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *error: object) -> None:
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._places:
            whole = np.array(self._places, np.int32).T.copy()
            columns = [*map(pa.array, whole), pa.array(self._tokens, pa.float32()), *(x.taken() for x in self._lists)]
            self._file.write_table(pa.Table.from_arrays(columns, schema=self.schema))
            self._places, self._tokens = [], []


class _Lists:
    """A column of lists of numbers in the making; a null has the length -1."""

    def __init__(self, dtype: type[np.generic]) -> None:
        self.dtype, self.lengths, self.values = dtype, list[int](), list[np.ndarray]()

    def add(self, lengths: Sequence[int], values: np.ndarray) -> None:
        """Add lists of these lengths, whose values follow each other."""
        self.lengths += lengths
        self.values.append(values)

    def add_nulls(self, count: int) -> None:
        """Add lines without a list."""
        self.lengths += [-1] * count

    def taken(self) -> Any:
        """Return the column as an Arrow array, and begin a new one."""
        import pyarrow as pa

        lengths = np.array(self.lengths)
        offsets = np.append(0, lengths.clip(0).cumsum()).astype(np.int32)
        values = np.concatenate([np.empty(0, self.dtype), *self.values]).astype(self.dtype)
        self.lengths, self.values = [], []
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), mask=pa.array(lengths < 0))


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
