"""Turns a dataset into the packs of a run: tokenise, filter, pack, and split into training and held-out packs."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from seergate.distill.config import TrainConfig
from seergate.distill.formatting import TEMPLATES, Formatter, MalformedRow, TrainingText, question
from seergate.distill.packing import pack
from seergate.distill.sources import RAW, no_rows, open_source
from seergate.durable import check_writable, naming
from seergate.errors import SeergateError
from seergate.json_file import read_json_text
from seergate.progress import working
from seergate.resources import available_cores

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

FORMAT = 9
"""Version of the token cache; to be incremented when tokenisation changes for the same rows."""

ROWS_PER_PROCESS = 2000
"""Rows per worker process; starting a worker takes longer than tokenising fewer rows."""


@dataclass(frozen=True)
class DataReport:
    """Counts of a dataset's rows, samples (the rows that can be trained on) and packs.

    Attributes:
        tokens, longest: tokens of all samples, and of the longest sample.
        truncated, dropped: samples longer than a pack, which are truncated to its length or left out.
        duplicates: samples left out because they equal an earlier one, after truncation.
        too_short: samples left out because no token has two past blocks to choose from, besides sink blocks.
        malformed: reason -> number of rows left out for it.
        notes: note of `TrainingText` -> number of rows with it.
        efficiency: share of the packs' capacity that is filled with tokens.
        mixed: source -> number of its rows; empty without a mixture.
    """

    rows: int
    samples: int
    tokens: int
    longest: int
    truncated: int
    dropped: int
    duplicates: int
    too_short: int
    malformed: dict[str, int]
    notes: dict[str, int]
    packs: int
    held_out: int
    efficiency: float
    mixed: dict[str, int] = field(default_factory=dict)

    def summary(self) -> str:
        """Return the counts as two to four lines for the console."""
        lines = [
            f"data: {self.samples:,} samples of {self.rows:,} rows, {self.tokens:,} tokens, longest {self.longest:,}",
            f"packs: {self.packs:,} to train on, {self.held_out:,} held out, {self.efficiency:.1%} full",
        ]
        if self.mixed:
            lines.append("mixed: " + ", ".join(f"{rows:,} rows of {name}" for name, rows in self.mixed.items()))
        left_out = {
            "truncated": self.truncated,
            "dropped as too long": self.dropped,
            "duplicates left out": self.duplicates,
            "left out (too short to select blocks)": self.too_short,
            **self.notes,
            **{f"malformed ({reason})": count for reason, count in self.malformed.items()},
        }
        notes = [f"{count:,} {what}" for what, count in left_out.items() if count]
        return "\n".join([*lines, *(["rows: " + ", ".join(notes)] if notes else [])])


class Samples:
    """The tokens of a dataset's samples, read from the Arrow file on access.

    Args:
        tokens: result of `tokenised`.
        rows: row number of each sample.
        lengths: number of tokens to use of each sample; stored as int64.
    """

    def __init__(self, tokens: Dataset, rows: list[int], lengths: list[int]) -> None:
        self._tokens, self._rows = tokens.select_columns("ids").with_format("numpy"), rows
        self.lengths = np.array(lengths, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, sample: int) -> np.ndarray:
        """Return the tokens of a sample, int32 ``[length]``."""
        ids = self._tokens[self._rows[sample]]["ids"][: self.lengths[sample]]
        return np.asarray(ids, dtype=np.int32)


@dataclass(frozen=True)
class TrainingData:
    """The packs of a run.

    Attributes:
        train: sample numbers of each training pack.
        held_out: sample numbers of each held-out pack.
        fingerprint: hash of the seed, the number of held-out packs and the samples; the same on every machine.
    """

    samples: Samples
    train: list[list[int]]
    held_out: list[list[int]]
    report: DataReport
    fingerprint: str


@working("packing the data")
def prepare_data(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    one_sample: bool = False,
    files: list[list[str]] | None = None,
    vocabulary: int | None = None,
) -> TrainingData:
    """Read and pack a run's data, tokenising it unless it is cached. Every process gets the same result.

    Args:
        one_sample: put one sample in each pack instead of as many as fit.
        files: result of `token_files` in another process; ignored if this process does not see the files.
        vocabulary: number of the model's embeddings; rows with other tokens are malformed.
    """
    if files is None or not all(Path(file).is_file() for part in files for file in part):
        files = token_files(config, tokenizer)
    tokens, mixed = _mixed(config, files)
    counts: dict[str, Any] = {"rows": len(tokens), "truncated": 0, "dropped": 0, "duplicates": 0}
    malformed: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    first: dict[str, tuple[int, int]] = {}  # digest of the tokens -> row and length of the first sample with them
    seen, ids = set[str](), tokens.select_columns("ids").with_format("numpy")
    about = tokens.select_columns(["length", "digest", "problem", "notes", "largest"])[:]
    for row, (length, digest, problem, noted, largest) in enumerate(zip(*about.values(), strict=True)):
        notes.update(noted)
        if vocabulary is not None and largest >= vocabulary:
            problem = "a token that the model has no embedding for"
        cut = length > config.max_length and config.over_length == "truncate"
        if problem:
            malformed[problem] += 1
        elif (used := _digest(ids[row]["ids"][: config.max_length]) if cut else digest) in seen:
            counts["duplicates"] += 1
        else:
            seen.add(used)
            first[digest] = row, length
            if length > config.max_length:
                counts["truncated" if cut else "dropped"] += 1
    counts |= {"malformed": dict(malformed), "notes": dict(notes)}
    long = config.max_length if config.over_length == "drop" else float("inf")
    unique = {digest: place for digest, place in first.items() if place[1] <= long}
    samples = Samples(tokens, [r for r, _ in unique.values()], [min(n, config.max_length) for _, n in unique.values()])
    # A gate distributes a row's attention over its past blocks, without the sink blocks; with fewer than two, there
    # is nothing to learn.
    usable = np.flatnonzero(samples.lengths > (2 + config.sink_blocks) * config.block_size)
    too_short = len(samples) - len(usable)
    if not len(usable):
        raise SeergateError(
            f"the dataset {config.data!r} has nothing to train on: {_why_empty(counts, too_short, config)}"
        )
    lengths = samples.lengths[usable]
    chosen_together = [[i] for i in range(len(usable))] if one_sample else pack(lengths, config.max_length)
    packs = [usable[chosen].tolist() for chosen in chosen_together]
    # At most a tenth of the packs is held out, so that a small dataset can still be trained on.
    held_out = set(
        random.Random(f"held-out/{config.seed}").sample(range(len(packs)), min(config.eval_packs, len(packs) // 10))
    )
    train = [chosen for i, chosen in enumerate(packs) if i not in held_out]
    report = DataReport(
        samples=len(usable),
        tokens=int(lengths.sum()),
        longest=int(lengths.max()),
        too_short=too_short,
        packs=len(train),
        held_out=len(held_out),
        efficiency=int(lengths.sum()) / (len(packs) * config.max_length),
        mixed=mixed,
        **counts,
    )
    contents = hashlib.sha256(f"{config.seed}/{len(held_out)}/{''.join(unique)}".encode() + lengths.tobytes())
    return TrainingData(samples, train, [packs[i] for i in sorted(held_out)], report, contents.hexdigest()[:16])


def token_files(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> list[list[str]]:
    """Return the Arrow files with the tokens of each source; files that are missing are created (`tokenised`)."""
    return [[file["filename"] for file in tokenised(one, tokenizer).cache_files] for one, _ in config.sources]


def _mixed(config: TrainConfig, files: list[list[str]]) -> tuple[Dataset, dict[str, int]]:
    """Draw rows from all sources by their shares until one is exhausted; count the rows of each unless it is alone."""
    from datasets import Dataset, concatenate_datasets, interleave_datasets

    parts = [concatenate_datasets([Dataset.from_file(file) for file in part]) for part in files]
    if len(parts) == 1:
        return parts[0], {}
    names, shares = zip(*((one.data, share) for one, share in config.sources), strict=True)
    named = [part.add_column("source", [name] * len(part)) for part, name in zip(parts, names, strict=True)]
    chances = [share / sum(shares) for share in shares]
    rows = interleave_datasets(named, probabilities=chances, seed=config.seed)
    return rows.remove_columns("source"), dict(Counter(rows["source"]))


@working("tokenising the data")
def tokenised(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Tokenise each row of a source, or read the result from the Arrow cache of `datasets`.

    Returns:
        One row for each row of the source, with the columns ``ids``, ``length`` (their number), ``largest`` (of them,
        or -1), ``digest`` (their hash), ``problem`` (why there are none, or ``""``) and ``notes`` (`TrainingText`).
    """
    from datasets import Features, Sequence, Value

    with _cache(config) as cache:
        rows = open_source(config, cache)
        if not len(rows):
            raise SeergateError(no_rows(config.data))
        formatter = Formatter(tokenizer, config.data_column, config.chat_template)
        templates = [*sorted(TEMPLATES.glob("*.jinja")), *filter(Path.is_file, [Path(config.chat_template or "")])]
        key = json.dumps(
            [
                FORMAT,
                rows._fingerprint,
                config.data_column,
                _identity(tokenizer),
                [file.read_text(encoding="utf-8") for file in templates],
            ]
        )
        name = hashlib.sha256(key.encode()).hexdigest()[:24]
        text = Value("string")
        return rows.map(
            tokenise,
            fn_kwargs={"formatter": formatter},
            batched=True,
            batch_size=100,  # at 1,000 long rows, workers may take a GB each
            remove_columns=rows.column_names,
            features=Features(
                {"ids": Sequence(Value("int32")), "length": Value("int64"), "largest": Value("int32")}
                | {"digest": text, "problem": text, "notes": Sequence(text)}
            ),
            num_proc=min(available_cores(), len(rows) // ROWS_PER_PROCESS) or None,
            cache_file_name=str(cache / f"{name}.arrow"),
            new_fingerprint=name,  # `datasets` would hash the tokenizer, but using a tokenizer changes its state
            desc="tokenising",
        )


def tokenise(columns: dict[str, list[Any]], formatter: Formatter) -> dict[str, list[Any]]:
    """Tokenise a batch of rows; returns the columns of `tokenised`."""
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    texts: dict[int, TrainingText] = {}
    problems = [""] * len(rows)
    for number, row in enumerate(rows):
        try:
            texts[number] = formatter.text(parsed(row))
        except MalformedRow as reason:
            problems[number] = str(reason)
    ids: list[list[int]] = [[] for _ in rows]
    for is_chat in (True, False):
        some = {number: rendered.text for number, rendered in texts.items() if rendered.is_chat is is_chat}
        if some:
            encoded = formatter.tokenizer(list(some.values()), add_special_tokens=not is_chat, verbose=False)
            for number, tokens in zip(some, encoded["input_ids"], strict=True):
                ids[number] = tokens
                problems[number] = "" if tokens else "no tokens"
    return {
        "ids": ids,
        "length": [len(some) for some in ids],
        "largest": [max(some, default=-1) for some in ids],
        "digest": [*map(_digest, ids)],
        "problem": problems,
        "notes": [texts[number].notes if number in texts else [] for number in range(len(rows))],
    }


def _digest(ids: Any) -> str:
    return hashlib.blake2b(np.asarray(ids, np.int32).tobytes(), digest_size=16).hexdigest()


def questions(config: TrainConfig) -> tuple[dict[int, list[dict[str, str]]], Counter[str]]:
    """Return the questions in the rows of a dataset.

    Returns:
        Row number -> the turns before the row's last answer; and reason -> number of rows without a question.
    """
    with _cache(config) as cache:
        rows = open_source(config, cache)
    by_row: dict[int, list[dict[str, str]]] = {}
    reasons: Counter[str] = Counter()
    for number, row in enumerate(rows):
        try:
            by_row[number] = question(parsed(row))
        except MalformedRow as reason:
            reasons[f"malformed ({reason})"] += 1
    return by_row, reasons


def parsed(row: dict[str, Any]) -> Any:
    """Return the contents of a row; rows of files and streams are stored as JSON text and parsed here."""
    if tuple(row) != RAW:
        return row
    if row["problem"]:
        raise MalformedRow(row["problem"])
    try:
        return read_json_text(row["json"])
    except ValueError as error:
        raise MalformedRow("not JSON") from error


@contextmanager
def _cache(config: TrainConfig) -> Iterator[Path]:
    """Yield the directory of tokenised data, which is made unless it exists; an error such as that of a full disk gets
    its name. Refuse a directory that cannot be written to.
    """
    if config.token_cache:
        cache = Path(config.token_cache)
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seergate" / "tokens"
    check_writable(cache)
    with naming(cache):
        yield cache


def _why_empty(counts: dict[str, Any], too_short: int, config: TrainConfig) -> str:
    reasons = [f"{n:,} malformed ({reason})" for reason, n in counts["malformed"].items()]
    reasons += [f"{counts['dropped']:,} longer than max_length"] if counts["dropped"] else []
    fit = f"{2 + config.sink_blocks} blocks of {config.block_size} tokens"
    reasons += [f"{too_short:,} that fit in {fit}"] if too_short else []
    return f"of {counts['rows']:,} rows, " + ", ".join(reasons)


def _identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash everything that determines how a tokenizer encodes text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    special = json.dumps({k: str(v) for k, v in tokenizer.special_tokens_map.items()}, sort_keys=True)
    return hashlib.sha256(f"{words}\n{special}\n{tokenizer.chat_template}".encode()).hexdigest()
