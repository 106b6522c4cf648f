"""Where training rows come from: generated problems, local files, or the Hub.

JSON is read line by line here rather than by `datasets`, which refuses a whole file for one row of another shape; one
bad line must cost one line.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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

HELD_OUT_NAMES = re.compile(r"(?i)(^|[^a-z])(test|valid|validation|val|dev|eval)([^a-z]|$)")
"""Names of files and folders that hold what is not to be trained on."""

COMMIT = re.compile(r"[0-9a-f]{40}")
"""A place in the Hub's history that does not move."""

_TRANSPORTS = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")


@dataclass(frozen=True)
class BadLine:
    """Stands for a line that could not be read.

    Attributes:
        reason: for the report.
    """

    reason: str


@dataclass(frozen=True)
class Source:
    """A dataset that can be iterated once.

    Attributes:
        rows: the rows; a `BadLine` in place of an unreadable one.
        identity: changes whenever the rows would.
        expected: the number of rows, if known, for progress.
        commit: of a dataset on the Hub, the one that the rows are of.
    """

    rows: Iterable[Any]
    identity: str
    expected: int | None = None
    commit: str | None = None

    def after(self, count: int) -> Iterable[Any]:
        """The rows without the first ``count``, which are passed over by the quickest way there is."""
        if count == self.expected:  # a dataset refuses to skip all of its rows
            return ()
        skip = getattr(self.rows, "skip", None)
        return skip(count) if skip else itertools.islice(self.rows, count, None)


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
        for name in ("data_config", "data_revision"):
            if getattr(config, name) is not None:
                raise SeergateError(
                    f"{name} is {getattr(config, name)!r}, but {config.data!r} lies on this machine, where there is "
                    f"nothing to choose; name the files themselves and leave out {name}"
                )
        return _local(path, config.data_split)
    if not _may_be_on_hub(config):
        raise SeergateError(f"the data file {config.data!r} does not exist")
    return _hub(config)


def data_commit(config: TrainConfig) -> str | None:
    """The commit that a run's dataset is at; ``None`` if it is not on the Hub, or the Hub does not answer.

    Raises:
        SeergateError: if the Hub has no such dataset or revision.
    """
    if not _may_be_on_hub(config):
        return None
    with _hub_sentences(config):
        return _commit(config)


def _may_be_on_hub(config: TrainConfig) -> bool:
    path = Path(config.data).expanduser()
    names_a_file = path.suffix in (*JSON_SUFFIXES, *TABLE_SUFFIXES) or config.data.startswith((".", "/", "~"))
    return not (config.data == CHAIN_SUM or names_a_file or path.exists())


def _local(path: Path, split: str) -> Source:
    if (path / "dataset_dict.json").is_file():  # a folder per split
        splits = sorted(folder.parent.name for folder in path.glob("*/dataset_info.json"))
        if split not in splits:
            raise SeergateError(f"data_split is {split!r}; {path} has {', '.join(splits) or 'none'}")
        path = path / split
    elif split != "train":
        raise SeergateError(f"data_split is {split!r}, but {path} has no splits; name the files of the split instead")
    if path.is_dir() and (path / "dataset_info.json").is_file():
        from datasets import load_from_disk

        stored = load_from_disk(str(path))
        return Source(stored, f"disk/{stored._fingerprint}", len(stored))
    known = (*JSON_SUFFIXES, *TABLE_SUFFIXES)
    files = sorted(p for p in path.rglob("*") if p.suffix in known) if path.is_dir() else [path]
    if not files or files[0].suffix not in known:
        raise SeergateError(f"{path} is no data: it must be a file, or hold files, of type {', '.join(known)}")
    aside = [file for file in files if HELD_OUT_NAMES.search(str(file.relative_to(path)))] if path.is_dir() else []
    if aside:
        raise SeergateError(
            f"{path} holds {aside[0].relative_to(path)}, which by its name is not to be trained on; name the files, "
            "or a folder of them, that are"
        )
    digest = hashlib.blake2b()
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "blake2b").digest())
    return Source(_rows_of_files(files), f"files/{digest.hexdigest()}")


def _rows_of_files(files: list[Path]) -> Iterator[Any]:
    for file in files:
        yield from _json_rows(file) if file.suffix in JSON_SUFFIXES else _table_rows(file)


def _json_rows(file: Path) -> Iterator[Any]:
    with file.open("rb") as stream:
        mark = len(codecs.BOM_UTF8) if stream.read(3) == codecs.BOM_UTF8 else 0
        stream.seek(mark)
        while (first := stream.read(1)) and first.isspace():
            pass
        stream.seek(mark)
        if first == b"[":
            try:
                yield from json.loads(stream.read().decode())
            except ValueError as error:
                raise SeergateError(f"{file} begins like a JSON list but is none: {error}") from error
            return
        for line in stream:
            if line.strip():
                try:
                    yield json.loads(line.decode())
                except UnicodeDecodeError:
                    yield BadLine("not UTF-8")
                except (ValueError, RecursionError):
                    yield BadLine("not JSON")


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
    from datasets import load_dataset_builder

    name = f"hub/{config.data}/{config.data_config}/{config.data_split}"
    with _hub_sentences(config):
        commit = _commit(config)
        builder = load_dataset_builder(config.data, config.data_config, revision=commit or config.data_revision)
        found = str(builder.hash)
        _check_commit(config, commit, found)
        known = found if COMMIT.fullmatch(found) else None
        if not config.streaming:
            builder.download_and_prepare()
            rows = builder.as_dataset(split=config.data_split)
            return Source(rows, f"{name}/{rows._fingerprint}", len(rows), known)
        rows = builder.as_streaming_dataset(split=config.data_split)
    return Source(Streamed(rows, config.data), f"{name}/{found}", commit=known)


@contextmanager
def _hub_sentences(config: TrainConfig) -> Iterator[None]:
    """Whatever goes wrong with a dataset of the Hub, in one sentence."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
    except SeergateError:
        raise
    except Exception as error:  # no network, unknown dataset, split or configuration: as many types as libraries
        why = first_line(error)
        if isinstance(error, RevisionNotFoundError):
            why = f"it has no revision {config.data_revision!r}"
        elif isinstance(error, RepositoryNotFoundError):
            why = "there is none of this name, or it is private and HF_TOKEN must hold a token that may read it"
        raise SeergateError(f"the dataset {config.data!r} cannot be loaded from the Hub: {why}") from error


def _check_commit(config: TrainConfig, commit: str | None, found: str) -> None:
    """Refuse other data than asked for: where the Hub fails, `datasets` takes what it downloaded last, whatever it is.

    Args:
        config: the run.
        commit: what its revision is, if that is known.
        found: what can be loaded.
    """
    dataset, revision = f"the dataset {config.data!r}", config.data_revision
    if commit is None and revision is not None:
        raise SeergateError(
            f"the Hub does not answer, so nobody can say what the revision {revision!r} of {dataset} is; the one "
            f"downloaded last is {found}: if you mean that, set data_revision to it"
        )
    if commit not in (None, found):
        raise SeergateError(
            f"{dataset} cannot be loaded at {commit}: the Hub does not give it, and what was downloaded last is "
            f"{found}; try again when it does, or set data_revision to that"
        )


def _commit(config: TrainConfig) -> str | None:
    """What a dataset's revision is at this moment, or was when the Hub last answered."""
    from huggingface_hub import constants, dataset_info

    revision = config.data_revision
    if revision is not None and COMMIT.fullmatch(revision):
        return revision
    try:
        return str(dataset_info(config.data, revision=revision).sha)
    except Exception as error:
        if not _unanswered(error):
            raise
    if revision is None:
        return None
    ref = Path(constants.HF_HUB_CACHE) / f"datasets--{config.data.replace('/', '--')}" / "refs" / revision
    return ref.read_text().strip() if ref.is_file() else None


def _unanswered(error: Exception) -> bool:
    """Whether the Hub could not be reached, rather than said no."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return bool(status >= 500)
    return isinstance(error, (ConnectionError, TimeoutError)) or type(error).__module__.split(".")[0] in _TRANSPORTS


@dataclass(frozen=True)
class Streamed:
    """Rows over the network, whose failures are many.

    Attributes:
        rows: a streaming dataset.
        name: it has for the user.
        skipped: rows that are left out at its beginning.

    Raises:
        SeergateError: in the middle of an iteration, with the number of rows that could be read.
    """

    rows: Any
    name: str
    skipped: int = 0

    def skip(self, count: int) -> Streamed:
        """The rows without the first ``count``; they are still read over the network, but not decoded one by one."""
        return Streamed(self.rows.skip(count), self.name, self.skipped + count)

    def __iter__(self) -> Iterator[Any]:
        read = self.skipped
        try:
            for read, row in enumerate(self.rows, start=self.skipped + 1):  # noqa: B007 (counted for the message)
                yield row
        except Exception as error:
            raise SeergateError(
                f"the dataset {self.name!r} broke off after {read:,} rows: {first_line(error)}"
            ) from error
