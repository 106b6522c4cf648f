"""Sources of training rows: generated problems, local files, or the Hub.

Each source becomes a `datasets.Dataset` in an Arrow file. JSON is read line by line here, because `datasets` refuses a
whole file if one row has other fields; here, a bad line costs one line only. The rows of JSON files, tables and
streams are stored as JSON text in the columns `RAW`.
"""

from __future__ import annotations

import codecs
import glob
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seergate.distill.config import CHAIN_SUM, TrainConfig
from seergate.errors import SeergateError, first_line
from seergate.eval.tasks.chain_sum import TRAINING_SEEDS, make_problems
from seergate.hub import hub_call
from seergate.json_file import read_json_text

if TYPE_CHECKING:
    from datasets import Dataset

CHAIN_SUM_PROBLEMS = 2000
"""Number of problems of `chain_sum` if ``data_limit`` is not given."""

JSON_SUFFIXES, TABLE_SUFFIXES = (".jsonl", ".json", ".ndjson"), {".parquet": "parquet", ".arrow": "arrow"}
COMPRESSED = (".bz2", ".gz", ".xz", ".zip", ".zst")

HELD_OUT_NAMES = re.compile(r"(?i)(^|[^a-z])(test|valid|validation|val|dev|eval|held[-_ ]?out|holdout)([^a-z]|$)")
"""Pattern of names of files and folders with evaluation data."""

COMMIT = re.compile(r"[0-9a-f]{40}")
"""Pattern of a commit hash on the Hub."""

ROWS_VERSION = 3
"""Version of stored rows; to be incremented if reading changes what the same files give."""
RAW = ("json", "problem")
"""Columns of rows that are stored as JSON text: the text, and the reason if there is none."""


def open_source(config: TrainConfig, cache: Path) -> Dataset:
    """Open the dataset of a run; a Hub dataset is read at ``data_revision``. Rows that must be copied are cached in
    the directory ``cache``. Raises `SeergateError` if the data is missing or cannot be read.
    """
    if config.data == CHAIN_SUM:
        count, (low, high) = config.data_limit or CHAIN_SUM_PROBLEMS, config.chain_sum_variables
        return _copied(CHAIN_SUM, _problems, cache, count=count, low=low, high=high, seed=TRAINING_SEEDS + config.seed)
    path = Path(config.data).expanduser()
    if path.exists():
        for name in ("data_config", "data_revision"):
            if getattr(config, name) is not None:
                raise SeergateError(
                    f"{name} is {getattr(config, name)!r}, but {config.data!r} lies on this machine, where no part "
                    f"can be chosen; name the files themselves and leave out {name}"
                )
        return _local(path, config, cache)
    if not may_be_on_hub(config):
        several = "; several sources need a share each (a:0.7 b:0.3)" if "," in config.data else ""
        raise SeergateError(f"the data file {config.data!r} does not exist{several}")
    return _hub(config, cache)


def may_be_on_hub(config: TrainConfig) -> bool:
    """Return whether ``data`` may be a Hub id: it is neither `CHAIN_SUM` nor a local file or directory."""
    path = Path(config.data).expanduser()
    names_a_file = path.suffix in (*JSON_SUFFIXES, *TABLE_SUFFIXES) or config.data.startswith((".", "/", "~"))
    names_a_file |= "," in config.data  # no Hub id has one
    return not (config.data == CHAIN_SUM or names_a_file or path.exists())


def _copied(source: str, read: Callable[..., Iterator[dict[str, str]]], cache: Path, **arguments: Any) -> Dataset:
    """Store the rows (columns `RAW`) of a generator in an Arrow file, named by the generator and its arguments."""
    from datasets import Dataset, Features, Value
    from datasets.exceptions import DatasetGenerationError

    columns = Features(dict.fromkeys(RAW, Value("string")))
    inputs = {"source": source, "read": read, "arguments": arguments, "version": ROWS_VERSION}
    try:
        return Dataset.from_generator(_not_empty, features=columns, cache_dir=str(cache), gen_kwargs=inputs)
    except DatasetGenerationError as error:
        raise error.__cause__ or error from None


def _not_empty(
    source: str, read: Callable[..., Iterator[dict[str, str]]], arguments: dict[str, Any], version: int
) -> Iterator[dict[str, str]]:
    number = 0
    for number, row in enumerate(read(**arguments), start=1):  # noqa: B007 (looked at below)
        yield row
    if not number:
        raise SeergateError(no_rows(source))


def no_rows(source: str) -> str:
    """Return the error message for an empty dataset."""
    return f"the dataset {source!r} has nothing to train on: it has no rows"


def _as_json(row: Any) -> dict[str, str]:
    # A table may have text as bytes; surrogates stand for what is not UTF-8.
    text = json.dumps(row, default=lambda x: x.decode(errors="surrogateescape") if isinstance(x, bytes) else str(x))
    return {"json": text, "problem": ""}


READ = {"messages", "prompt", "completion", "text", "question"}
"""Columns that are read, beside ``data_column``."""


def _columns(rows: Any, column: str | None) -> Any:
    """Rows with only the columns that are read, since others, such as images, might not be decoded. With all columns
    if the wanted one is missing, so that the error can name them.
    """
    kept = [name for name in rows.column_names or () if name in READ or name == column]
    return rows.select_columns(kept) if kept and column in (None, *kept) else rows


def _limited(rows: Dataset, config: TrainConfig) -> Dataset:
    limit, rows = config.data_limit, _columns(rows, config.data_column)
    return rows if limit is None or limit >= len(rows) else rows.select(range(limit))


def _problems(count: int, low: int, high: int, seed: int) -> Iterator[dict[str, str]]:
    for problem in make_problems(count, (low, high), seed):
        yield _as_json({"messages": problem.messages})


def _local(path: Path, config: TrainConfig, cache: Path) -> Dataset:
    split = config.data_split
    if (path / "dataset_dict.json").is_file():  # one folder per split
        splits = sorted(folder.parent.name for folder in path.glob("*/dataset_info.json"))
        if split not in splits:
            raise SeergateError(f"data_split is {split!r}; {path} has {', '.join(splits) or 'none'}")
        path = path / split
    elif split != "train":
        raise SeergateError(f"data_split is {split!r}, but {path} has no splits; name the files of the split instead")
    if path.is_dir() and (path / "dataset_info.json").is_file():
        from datasets import load_from_disk
        from datasets.fingerprint import Hasher

        rows = load_from_disk(str(path)).with_format(None)  # one may be saved with it
        # Its fingerprint is of the functions that made the rows, which may have read something else this time.
        rows._fingerprint = Hasher.hash([rows._fingerprint, _stamps(sorted(path.glob("*.arrow")))])
        return _limited(rows, config)
    suffixes = (*JSON_SUFFIXES, *TABLE_SUFFIXES)
    every = glob.glob(f"{glob.escape(str(path))}/**", recursive=True)  # in folders that are links, too; nothing hidden
    inside = sorted(map(Path, every)) if path.is_dir() else [path]
    files = [file for file in inside if file.suffix in suffixes]
    unread = [file for file in inside if file.suffix in COMPRESSED and Path(file.stem).suffix in suffixes]
    if packed := [file for file in unread if not file.with_suffix("").exists()]:
        raise SeergateError(f"{packed[0]} is compressed and would not be read; decompress it")
    if not files:
        raise SeergateError(f"{path} holds no data: it must be a file, or hold files, of type {', '.join(suffixes)}")
    aside = [file for file in files if HELD_OUT_NAMES.search(str(file.relative_to(path)))] if path.is_dir() else []
    if aside:
        raise SeergateError(
            f"{path} holds {aside[0].relative_to(path)}, which by its name is not to be trained on; name the files, "
            "or a folder of them, that are"
        )
    files = sorted({file.resolve(): file for file in reversed(files)}.values())  # once, if a link leads to it again
    options = {"limit": config.data_limit, "column": config.data_column}
    return _copied(config.data, _file_rows, cache, files=_stamps(files), **options)


def _stamps(files: list[Path]) -> tuple[tuple[str, int, int], ...]:
    """Path, size and time of each file: they tell the cached copies of a changed file apart."""
    return tuple((str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files)


def _file_rows(
    files: tuple[tuple[str, int, int], ...], limit: int | None, column: str | None
) -> Iterator[dict[str, str]]:
    paths = [Path(name) for name, *_ in files]  # size and time only distinguish the cached copies of a changed file
    read = (json_rows(path) if path.suffix in JSON_SUFFIXES else _table_rows(path, column) for path in paths)
    return itertools.islice(itertools.chain.from_iterable(read), limit)


def json_rows(file: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a JSONL file, or of a file that holds a JSON list, as columns `RAW`."""
    with file.open("rb") as stream:
        mark = len(codecs.BOM_UTF8) if stream.read(3) == codecs.BOM_UTF8 else 0
        stream.seek(mark)
        while (first := stream.read(1)) and first.isspace():
            pass
        stream.seek(mark)
        if first == b"[":
            try:
                rows = read_json_text(stream.read().decode())
            except ValueError as error:
                raise SeergateError(f"{file} begins like a JSON list but is not valid JSON: {error}") from error
            yield from map(_as_json, rows)
            return
        for line in stream:
            if line.strip():
                try:
                    yield {"json": line.decode(), "problem": ""}
                except UnicodeDecodeError:
                    yield {"json": "", "problem": "not UTF-8"}


def _table_rows(file: Path, column: str | None) -> Iterator[dict[str, str]]:
    import pyarrow
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        # Streaming reads the file in place; the default would copy it into a cache first.
        place = glob.escape(str(file))  # `datasets` reads names as patterns
        kind = TABLE_SUFFIXES[file.suffix]
        # By default, Parquet's batch has as many rows as the file's first part, which may be none.
        options = {"batch_size": 1000} if kind == "parquet" else {}
        rows = load_dataset(kind, data_files=place, split="train", streaming=True, **options)
        yield from map(_as_json, _columns(rows, column))
    except (pyarrow.ArrowException, DatasetGenerationError, OSError, ValueError) as error:  # ValueError: of a type
        raise SeergateError(f"{file} cannot be read: {first_line(error)}") from error


def _hub(config: TrainConfig, cache: Path) -> Dataset:
    from datasets import load_dataset_builder

    with hub_call(unloadable(config)):
        builder = load_dataset_builder(config.data, config.data_config, revision=config.data_revision)
        commit, revision = str(builder.hash), config.data_revision
        if revision is not None and COMMIT.fullmatch(revision) and commit != revision:
            # If the Hub does not answer, `datasets` uses the newest downloaded commit, which may be another one.
            raise SeergateError(
                f"the dataset {config.data!r} cannot be loaded at {revision}: the Hub does not give it, and the "
                f"commit that was downloaded last is {commit}; try again later, or set data_revision to that"
            )
        asked = {re.split(r"[\[(]", part)[0].strip() for part in config.data_split.split("+")}
        if (known := set(map(str, builder.info.splits or ()))) and asked - known - {"all"}:
            raise SeergateError(f"data_split is {config.data_split!r}; {config.data} has {', '.join(sorted(known))}")
        if not config.streaming:
            builder.download_and_prepare()
            return _limited(builder.as_dataset(split=config.data_split), config)
        place = {"name": config.data, "part": config.data_config, "split": config.data_split, "revision": commit}
        options = {"limit": config.data_limit, "column": config.data_column}
        return _copied(config.data, _streamed_rows, cache, **place, **options)


def _streamed_rows(
    name: str, part: str | None, split: str, revision: str, limit: int | None, column: str | None
) -> Iterator[dict[str, str]]:
    from datasets import load_dataset_builder

    commit = revision if COMMIT.fullmatch(revision) else None
    rows = load_dataset_builder(name, part, revision=commit).as_streaming_dataset(split=split)
    return itertools.islice(streamed(_columns(rows, column), name), limit)


def streamed(rows: Any, name: str) -> Iterator[dict[str, str]]:
    """Yield rows that are streamed over the network, as columns `RAW`.

    Raises:
        SeergateError: if streaming fails, with the number of rows read so far.
    """
    read = 0
    try:
        for read, row in enumerate(rows, start=1):  # noqa: B007 (counted for the message)
            yield _as_json(row)
    except Exception as error:
        raise SeergateError(f"the dataset {name!r} broke off after {read:,} rows: {first_line(error)}") from error


def unloadable(config: TrainConfig) -> str:
    """Return the start of an error message about a dataset on the Hub."""
    revision = f" at revision {config.data_revision!r}" if config.data_revision else ""
    return f"the dataset {config.data!r} cannot be loaded from the Hub{revision}"
