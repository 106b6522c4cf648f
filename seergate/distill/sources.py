"""Where training rows come from: generated problems, local files, or the Hub.

JSON is read line by line here rather than by `datasets`, which refuses a whole file for one row of another shape; one
bad line must cost one line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seergate.chain_sum import make_problems
from seergate.distill.config import CHAIN_SUM, TrainConfig
from seergate.errors import SeergateError, first_line

TRAINING_SEEDS = 1_000_000
"""Training problems are drawn with seeds from here on, evaluation problems with smaller ones."""

CHAIN_SUM_PROBLEMS = 2000
"""How many problems `chain_sum` draws when no limit is given."""

JSON_SUFFIXES, TABLE_SUFFIXES = (".jsonl", ".json", ".ndjson"), {".parquet": "parquet", ".arrow": "arrow"}

BAD_LINE = object()
"""Stands for a line that could not be parsed."""


@dataclass(frozen=True)
class Source:
    """A dataset that can be iterated once.

    Attributes:
        rows: the rows; `BAD_LINE` in place of an unreadable one.
        identity: changes whenever the rows would.
        expected: the number of rows, if known, for progress.
    """

    rows: Iterable[Any]
    identity: str
    expected: int | None = None


def open_source(config: TrainConfig) -> Source:
    """Find the data that a run asks for.

    Raises:
        SeergateError: if it does not exist or cannot be read.
    """
    if config.data == CHAIN_SUM:
        count = config.data_limit or CHAIN_SUM_PROBLEMS
        low, high = config.chain_sum_variables
        problems = make_problems(count, (low, high), TRAINING_SEEDS + config.seed)
        identity = f"{CHAIN_SUM}/{low}-{high}/{count}/{config.seed}"
        return Source(({"messages": problem.messages} for problem in problems), identity, count)
    path = Path(config.data).expanduser()
    if path.exists():
        return _local(path)
    if path.suffix in (*JSON_SUFFIXES, *TABLE_SUFFIXES) or config.data.startswith((".", "/", "~")):
        raise SeergateError(f"the data file {config.data!r} does not exist")
    return _hub(config)


def _local(path: Path) -> Source:
    if path.is_dir() and (path / "dataset_info.json").is_file():
        from datasets import Dataset, load_from_disk

        stored = load_from_disk(str(path))
        if not isinstance(stored, Dataset):
            raise SeergateError(f"{path} holds several splits; name the directory of one of them")
        return Source(stored, f"disk/{stored._fingerprint}", len(stored))
    known = (*JSON_SUFFIXES, *TABLE_SUFFIXES)
    files = sorted(p for p in path.rglob("*") if p.suffix in known) if path.is_dir() else [path]
    if not files or files[0].suffix not in known:
        raise SeergateError(f"{path} is no data: it must be a file, or hold files, of type {', '.join(known)}")
    digest = hashlib.blake2b()
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "blake2b").digest())
    return Source(_rows_of_files(files), f"files/{digest.hexdigest()}")


def _rows_of_files(files: list[Path]) -> Iterator[Any]:
    for file in files:
        yield from _json_rows(file) if file.suffix in JSON_SUFFIXES else _table_rows(file)


def _json_rows(file: Path) -> Iterator[Any]:
    with file.open(encoding="utf-8", errors="replace") as stream:
        while (first := stream.read(1)) and first.isspace():
            pass
        stream.seek(0)
        if first == "[":
            try:
                yield from json.load(stream)
            except ValueError as error:
                raise SeergateError(f"{file} begins like a JSON list but is none: {error}") from error
            return
        for line in stream:
            if line.strip():
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError):
                    yield BAD_LINE


def _table_rows(file: Path) -> Iterator[Any]:
    import pyarrow
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        # Streaming reads the file in place; the default would copy it into a cache first.
        yield from load_dataset(TABLE_SUFFIXES[file.suffix], data_files=str(file), split="train", streaming=True)
    except (pyarrow.ArrowException, DatasetGenerationError, OSError) as error:
        raise SeergateError(f"{file} cannot be read: {first_line(error)}") from error


def _hub(config: TrainConfig) -> Source:
    from datasets import load_dataset
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    name, revision = f"hub/{config.data}/{config.data_config}/{config.data_split}", config.data_revision
    try:
        if config.streaming:
            from huggingface_hub import dataset_info

            revision = dataset_info(config.data, revision=revision).sha  # rows and identity are of the same commit
        rows = load_dataset(
            config.data,
            config.data_config,
            split=config.data_split,
            revision=revision,
            streaming=config.streaming,
        )
        if not config.streaming:
            return Source(rows, f"{name}/{rows._fingerprint}", len(rows))
    except Exception as error:  # no network, unknown dataset, split or configuration: as many types as libraries
        why = first_line(error)
        if isinstance(error, RevisionNotFoundError):
            why = f"it has no revision {config.data_revision!r}"
        elif isinstance(error, RepositoryNotFoundError):
            why = "there is none of this name, or it is private and HF_TOKEN must hold a token that may read it"
        raise SeergateError(f"the dataset {config.data!r} cannot be loaded from the Hub: {why}") from error
    return Source(streamed(rows, config.data), f"{name}/{revision}")


def streamed(rows: Iterable[Any], name: str) -> Iterator[Any]:
    """Rows over the network, whose failures are many.

    Raises:
        SeergateError: in the middle, with the number of rows read.
    """
    read = 0
    try:
        for read, row in enumerate(rows, start=1):  # noqa: B007 (counted for the message)
            yield row
    except Exception as error:
        raise SeergateError(f"the dataset {name!r} broke off after {read:,} rows: {first_line(error)}") from error
