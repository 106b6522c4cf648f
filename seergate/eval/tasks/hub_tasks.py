r"""Declarations of the tasks whose problems come from the Hub (or GitHub).

Each dataset is pinned to a commit, and the text of its problems is hashed into the run's configuration, so that two
runs that differ in a single character of a problem are never compared. Prompts, limits and numbers of samples are
those of SeerAttention-R (section 4.1 and its published evaluation code): 64 samples for AIME, 8 for MATH-500, 16 for
GPQA-Diamond, and 32,768 tokens, **prompt included**.

Without a network, ``source=`` names a local copy: a ``.json``, ``.jsonl``, ``.parquet`` or ``.csv`` file with the
same columns.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from seergate.checks import check_count
from seergate.errors import SeergateError
from seergate.eval.grading.graders import check_gold
from seergate.eval.sampling import Sampling
from seergate.eval.tasks.shots import MINERVA, STOP, Example, gsm8k_answer, gsm8k_example, math_example, with_examples
from seergate.eval.tasks.task import Problem, Task, as_text, read_each, words
from seergate.hub import hub_call
from seergate.json_file import json_lines, read_json_text

MATH_INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
CHOICE_INSTRUCTION = (
    "\n\nPlease reason step-by-step and put your choice letter without any other text with \\boxed{} in the end."
)
LETTERS = "ABCD"
PAPER_LENGTH = 32768
SEED = 0
"""Seed of the order of GPQA's options."""
PLAIN_LENGTH = 512
"""Maximum tokens of an answer that continues a text: the examples are short."""
SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".csv")
NO_VALUE = ["", "NaN", "nan", "null", "NULL", "<NA>"]
"""Missing cells of CSV files; by default ``None`` and ``N/A`` would be, too, which may be answers to choose from."""

PUBLISHED_GPQA = (
    "https://raw.githubusercontent.com/microsoft/SeerAttention/aba03e3f2caefd0ccd21e576670aa830b748c84e"
    "/eval/reasoning_tasks/data/gpqa/test.jsonl"
)


@dataclass(frozen=True)
class HubTask:
    """A declaration of a task.

    Attributes:
        repository: dataset id on the Hub; or the address of one JSON-lines file.
        revision: commit; ``None`` if the address itself names one.
        read: ``(record, number) -> Problem``.
        config: configuration of the dataset.
        chance: accuracy of guessing.
        samples: answers per problem in the paper.
        budgets: token budgets of the paper's Figure 5.
        example: ``(record, number) -> `` worked example; ``None`` for a task without.
        shown: worked examples to show without a file of some; the records of the Hub's ``train`` split if empty.
    """

    name: str
    repository: str
    revision: str | None
    read: Callable[[dict[str, Any], int], Problem]
    config: str | None = None
    split: str = "train"
    grader: str = "math"
    samples: int = 1
    budgets: tuple[int, ...] = (1024, 2048, 4096, 6144)
    chance: float | None = None
    example: Callable[[dict[str, Any], int], Example] | None = None
    shown: Sequence[Example] = ()

    def __call__(
        self,
        *,
        problems: int | None = None,
        source: str | None = None,
        shots: int = 0,
        shots_source: str | None = None,
        chat: bool | None = None,
    ) -> Task:
        """Make the task.

        Args:
            problems: number of problems to use, from the first on; all if ``None``.
            source: a local file to use instead of the Hub's.
            shots: number of worked examples before each question.
            shots_source: a file with the examples, in the data set's columns; ``None`` takes `shown`, or the Hub's.
            chat: ask in a user's turn, after turns with the examples. Otherwise the model continues a text that ends
                with the question, for base models. ``None`` means true without examples.
        """
        task = Task(
            name=self.name,
            load=lambda: islice(self._problems(source), problems),
            grader=self.grader,
            max_total_tokens=PAPER_LENGTH,
            samples=self.samples,
            chance=self.chance,
            budgets=self.budgets,
            options={"source": source or self.address, "problems": problems, "seed": SEED},
        )
        return self._with_examples(task, shots, shots_source, not shots if chat is None else chat)

    def _with_examples(self, task: Task, shots: int, source: str | None, chat: bool) -> Task:
        """The task with worked examples before each question, or as a text to continue."""
        check_count("shots", shots, 0)
        if source is not None and not shots:
            raise ValueError(f"shots_source is {source!r} with shots 0; give shots, the number of examples, too")
        if chat and not shots:
            return task
        if (example := self.example) is None:
            raise ValueError(
                f"{f'shots is {shots}' if shots else 'chat is false'}; the task {self.name!r} has no worked examples "
                "and is asked in a user's turn only"
            )
        if not shots:
            raise ValueError("chat is false with shots 0; give shots, whose answers show the form of an answer")

        def load() -> Iterator[Problem]:
            where = source or (f"the {len(self.shown)} examples of {self.name!r}" if self.shown else self.address)
            own = self.shown if source is None else ()
            shown = list(islice(own or read_each(self._records(source, "train"), example, where), shots))
            if len(shown) < shots:
                raise SeergateError(f"shots is {shots}; {where} has only {len(shown)}")
            for problem in task.load():
                yield with_examples(problem, shown, MATH_INSTRUCTION, chat)

        options = {**task.options, "shots": shots, "shots_source": source, "chat": chat}
        after = replace(task, load=load, options=options)
        if chat:
            return after
        return replace(after, samples=1, sampling=Sampling(), max_new_tokens=PLAIN_LENGTH, stop=(STOP,))

    @property
    def address(self) -> str:
        """The dataset's id or address, commit included."""
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"

    def _problems(self, source: str | None) -> Iterator[Problem]:
        def read(record: dict[str, Any], number: int) -> Problem:
            problem = self.read(record, number)
            check_gold(self.grader, problem.gold)
            return problem

        return read_each(self._records(source), read, source or self.address)

    def _records(self, source: str | None, split: str | None = None) -> Any:
        place = source or self.address
        what, option = ("worked examples", "--shots-source") if split else ("problems", "--task-source")
        unread = f"the {what} of {self.name!r} cannot be read from {place}"
        if source is not None:
            with hub_call(unread, asks=False):
                return _read_file(Path(source), what)
        import datasets

        with hub_call(f"{unread} (with a copy on disk, give its path as {option})"):
            try:
                if self.revision is None:
                    return datasets.load_dataset("json", data_files=self.repository, split="train")
                return datasets.load_dataset(
                    self.repository, self.config, split=split or self.split, revision=self.revision
                )
            except datasets.exceptions.DatasetGenerationError as error:
                raise error.__cause__ or error from None


def _read_file(file: Path, what: str) -> list[Any]:
    """The records of a local file, each value by itself. (`datasets` would give each column one type.)"""
    kind = file.suffix
    if not file.is_file():
        raise SeergateError(f"the file of the {what}, {file}, does not exist")
    if kind not in SUFFIXES:
        raise SeergateError(f"the file of the {what}, {file}, must end in {', '.join(SUFFIXES)}")
    if kind == ".parquet":
        import pyarrow.parquet

        records = pyarrow.parquet.ParquetFile(file).read().to_pylist()
    elif kind == ".csv":
        import pandas

        table = pandas.read_csv(file, dtype=str, keep_default_na=False, na_values=NO_VALUE).astype(object)
        if not isinstance(table.index, pandas.RangeIndex):  # pandas takes what precedes the columns as an index
            raise SeergateError(f"the rows of {file} have more cells than its first line has names")
        records = table.where(table.notna(), None).to_dict("records")
    elif (text := file.read_text(encoding="utf-8-sig")).lstrip().startswith("["):
        records = read_json_text(text)
    else:
        records = [record for _, record in json_lines(file)]
    if not records:
        raise SeergateError(f"the file of the {what}, {file}, is empty")
    return records


def _name(record: dict[str, Any], number: int) -> str:
    """A problem's own id, else its number. Where only other rows have an id, it is ``None``."""
    return str(next((own for own in map(record.get, ("unique_id", "Record ID", "id")) if own is not None), number))


def _math(text: str, gold: str, number: int, record: dict[str, Any]) -> Problem:
    return Problem(_name(record, number), gold, messages=({"role": "user", "content": text + MATH_INSTRUCTION},))


def _aime(record: dict[str, Any], number: int) -> Problem:
    answer = as_text("answer", record["answer"]).strip()
    if not (answer.isascii() and answer.isdigit()):
        raise ValueError(f"'answer' is {record['answer']!r}; it must be an integer, as all answers of AIME are")
    return _math(words(record, "problem"), str(int(answer)), number, record)


def _math500(record: dict[str, Any], number: int) -> Problem:
    return _math(words(record, "problem"), words(record, "answer"), number, record)


def _gsm8k(record: dict[str, Any], number: int) -> Problem:
    return _math(words(record, "question"), gsm8k_answer(record)[1], number, record)


def _gpqa(record: dict[str, Any], number: int) -> Problem:
    """A problem with its options in random order, which is the same for every model, method and sample."""
    fields = ("Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3)))
    options = [words(record, field).strip() for field in fields]
    name = _name(record, number)
    order = list(range(len(options)))
    random.Random(f"gpqa/{SEED}/{name}").shuffle(order)
    lines = [f"{letter}. {options[i]}" for letter, i in zip(LETTERS, order, strict=True)]
    text = f"{words(record, 'Question').strip()}\n\n" + "\n".join(lines) + CHOICE_INSTRUCTION
    return Problem(name, LETTERS[order.index(0)], messages=({"role": "user", "content": text},))


def _gpqa_published(record: dict[str, Any], number: int) -> Problem:
    """The published file's own prompt; its right option is A in all 198 problems."""
    text, gold = words(record, "question"), words(record, "answer")
    return Problem(_name(record, number), gold, messages=({"role": "user", "content": text},))


_AIME: dict[str, Any] = {"samples": 64, "budgets": (2048, 4096, 6144, 8192)}
_MATH: dict[str, Any] = {"samples": 8, "split": "test", "example": math_example, "shown": MINERVA}
_GSM8K: dict[str, Any] = {"config": "main", "split": "test", "example": gsm8k_example}
_CHOICE: dict[str, Any] = {"samples": 16, "grader": "letter", "chance": 1 / len(LETTERS)}
_GPQA: dict[str, Any] = {"config": "gpqa_diamond", **_CHOICE}

HUB_TASKS: dict[str, HubTask] = {
    task.name: task
    for task in (
        HubTask("aime24", "HuggingFaceH4/aime_2024", "2fe88a2f1091d5048c0f36abc874fb997b3dd99a", _aime, **_AIME),
        HubTask("aime25", "yentinglin/aime_2025", "6f71d77b0b89b9dabe07ab466c51df33f514df7f", _aime, **_AIME),
        HubTask("math500", "HuggingFaceH4/MATH-500", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be", _math500, **_MATH),
        HubTask("gpqa_diamond", "Idavidrein/gpqa", "633f5ee89ab8ad4522a9f850766b73f62147ffdd", _gpqa, **_GPQA),
        HubTask("gpqa_diamond_published", PUBLISHED_GPQA, None, _gpqa_published, **_CHOICE),
        HubTask("gsm8k", "openai/gsm8k", "cc7b047b6e5bb11b4f1af84efc572db110a51b3c", _gsm8k, **_GSM8K),
    )
}
