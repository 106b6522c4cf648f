"""From a dataset to the packs of a run: tokenised, packed, split, counted."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from seergate.distill.config import TrainConfig
from seergate.distill.formatting import TEMPLATES, Formatter
from seergate.distill.packing import PackedBatch, efficiency, pack
from seergate.distill.sources import open_source
from seergate.distill.token_store import TokenStore, default_cache, store_key
from seergate.errors import SeergateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class DataReport:
    """What became of a dataset's rows.

    Attributes:
        rows: rows read.
        samples: rows that can be trained on.
        tokens: in all samples.
        longest: tokens of the longest sample.
        truncated: samples cut to the length of a pack.
        dropped: samples left out because they are longer than a pack.
        duplicates: samples left out because an equal one came before.
        too_short: samples left out because they fit in two blocks: no row has two past blocks to choose from.
        malformed: reason -> rows left out for it.
        think_added: samples that lacked the opening think tag and got it.
        no_reasoning: samples without reasoning.
        earlier_reasoning: rows of which the reasoning of earlier assistant turns was left out: the model does not see
            it again at inference either.
        unanswered: rows of which the last turns were left out, because no assistant turn follows them.
        packs: packs to train on.
        held_out: packs kept for evaluation.
        efficiency: share of the packs' capacity that holds tokens.
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
    think_added: int
    no_reasoning: int
    earlier_reasoning: int
    unanswered: int
    packs: int
    held_out: int
    efficiency: float

    def summary(self) -> str:
        """Two or three lines for the console."""
        lines = [
            f"data: {self.samples:,} samples of {self.rows:,} rows, {self.tokens:,} tokens, longest {self.longest:,}",
            f"packs: {self.packs:,} to train on, {self.held_out:,} held out, {self.efficiency:.1%} full",
        ]
        left_out = {
            "truncated": self.truncated,
            "dropped as too long": self.dropped,
            "duplicates left out": self.duplicates,
            "that fit in two blocks left out": self.too_short,
            "given their opening think tag": self.think_added,
            "without reasoning": self.no_reasoning,
            "without the reasoning of their earlier turns": self.earlier_reasoning,
            "cut off after their last answer": self.unanswered,
            **{f"malformed ({reason})": count for reason, count in self.malformed.items()},
        }
        notes = [f"{count:,} {what}" for what, count in left_out.items() if count]
        return "\n".join([*lines, *(["rows: " + ", ".join(notes)] if notes else [])])

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class TrainingData:
    """The packs of a run.

    Attributes:
        store: the tokenised samples.
        train: per pack to train on, its samples.
        held_out: per pack to evaluate on, its samples.
        report: what became of the rows.
        fingerprint: changes whenever the packs would.
        commit: of a dataset on the Hub, the one that the rows are of.
    """

    store: TokenStore
    train: list[list[int]]
    held_out: list[list[int]]
    report: DataReport
    fingerprint: str
    commit: str | None = None

    def batch(self, samples: list[int]) -> PackedBatch:
        """The tensors of a pack."""
        return PackedBatch.of([self.store[i] for i in samples])


def prepare_data(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    progress: Callable[[int, int | None], None] = lambda rows, expected: None,
) -> TrainingData:
    """Read, tokenise (or find tokenised) and pack a run's data. Every process gets the same result.

    Args:
        config: the run.
        tokenizer: of the frozen model.
        progress: called with the number of rows read so far, and how many are expected if that is known. If it goes
            on where an earlier build was killed, the first call says where.

    Raises:
        SeergateError: if there is no data, or nothing in it can be used, with the reasons counted.
    """
    source = open_source(config)
    formatter = Formatter(tokenizer, config.data_column, config.chat_template)
    key = store_key(
        source.identity,
        config.data_limit,
        config.data_column,
        config.max_length,
        config.over_length,
        _tokenizer_identity(tokenizer),
        Path(config.chat_template).read_text()
        if config.chat_template and Path(config.chat_template).is_file()
        else None,
        [file.read_text() for file in sorted(TEMPLATES.glob("*.jinja"))],
    )
    expected = min((n for n in (source.expected, config.data_limit) if n is not None), default=None)
    directory = (Path(config.token_cache) if config.token_cache else default_cache()) / key
    store = TokenStore.build(
        directory,
        source,
        formatter,
        max_length=config.max_length,
        drop_over_length=config.over_length == "drop",
        limit=config.data_limit,
        progress=lambda rows: progress(rows, expected),
    )
    # The gate distributes a row over its past blocks: until there are two, every gate is right and none learns.
    usable = np.flatnonzero(store.lengths > 2 * config.block_size)
    too_short = len(store) - len(usable)
    if not len(usable):
        raise SeergateError(
            f"the dataset {config.data!r} has nothing to train on: {_why_empty(store.counts, too_short, config)}"
        )
    lengths = store.lengths[usable]
    packs = [usable[samples].tolist() for samples in pack(lengths, config.max_length)]
    # A dataset of a few packs still trains: at most a tenth of them is held out.
    held = set(
        random.Random(f"held-out/{config.seed}").sample(range(len(packs)), min(config.eval_packs, len(packs) // 10))
    )
    train = [samples for i, samples in enumerate(packs) if i not in held]
    report = DataReport(
        samples=len(usable),
        tokens=int(lengths.sum()),
        longest=int(lengths.max()),
        too_short=too_short,
        packs=len(train),
        held_out=len(held),
        efficiency=efficiency(lengths, packs, config.max_length),
        **store.counts,
    )
    contents = hashlib.sha256(f"{key}/{config.seed}/{len(held)}".encode() + np.ascontiguousarray(lengths).tobytes())
    evaluated = [packs[i] for i in sorted(held)]
    return TrainingData(store, train, evaluated, report, contents.hexdigest()[:16], source.commit)


def _why_empty(counts: dict[str, Any], too_short: int, config: TrainConfig) -> str:
    if not counts["rows"]:
        return "it has no rows"
    reasons = [f"{n:,} malformed ({reason})" for reason, n in counts["malformed"].items()]
    reasons += [f"{counts['dropped']:,} longer than max_length"] if counts["dropped"] else []
    reasons += [f"{too_short:,} that fit in two blocks of {config.block_size} tokens"] if too_short else []
    return f"of {counts['rows']:,} rows, " + ", ".join(reasons)


def _tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of all that decides what a text's tokens are."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    special = json.dumps({k: str(v) for k, v in tokenizer.special_tokens_map.items()}, sort_keys=True)
    return hashlib.sha256(f"{words}\n{special}\n{tokenizer.chat_template}".encode()).hexdigest()
