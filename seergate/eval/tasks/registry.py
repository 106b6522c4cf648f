"""Tasks: where problems come from, how they are graded, and how long an answer may be.

A new task is a function that returns a `Task` and one line in `TASKS`. Problems are made only when they are iterated
over, so that naming a task costs nothing.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from seergate.checks import check_count, holds_turns, is_int, is_number
from seergate.errors import SeergateError, did_you_mean
from seergate.eval.grading.graders import BOXED, GRADERS, check_gold, check_grader
from seergate.eval.grading.programs import PROGRAM
from seergate.eval.method_text import read_options
from seergate.eval.sampling import Sampling
from seergate.eval.tasks.chain_sum import GIVENS, NAMES, TRAINING_SEEDS, make_problems
from seergate.eval.tasks.hub_tasks import HUB_TASKS, MATH_INSTRUCTION, PAPER_LENGTH
from seergate.eval.tasks.humaneval import humaneval
from seergate.eval.tasks.retrieval import needle, perplexity, variable_tracking
from seergate.eval.tasks.task import Problem, Task, as_text, words
from seergate.json_file import LINES, json_lines
from seergate.paths import exists


def chain_sum(*, problems: int = 64, variables: int = 40, seed: int = 0) -> Task:
    """The tiny reasoner's task, on problems that no training run has seen.

    Args:
        problems: number of problems.
        variables: size of a problem; prompt and solution together take about 27 tokens per variable.
        seed: seed of the problems, below `TRAINING_SEEDS`.
    """
    check_count("variables", variables, GIVENS + 1, NAMES)
    if not 0 <= seed < TRAINING_SEEDS:
        raise ValueError(f"the task's seed is {seed}; it must be in 0..{TRAINING_SEEDS - 1}, as larger ones train")

    def load() -> Iterator[Problem]:
        for i, problem in enumerate(make_problems(problems, variables, seed)):
            yield Problem(f"{variables}-{seed}-{i}", problem.answer, messages=(problem.messages[0],))

    return Task(
        name="chain_sum",
        load=load,
        grader="digit",
        # a right solution takes 13 tokens per variable; a lost reasoner may go round in circles for a while
        max_new_tokens=17 * variables + 32,
        sampling=Sampling(),
        chance=0.1,
        budgets=(64, 128, 256, 512),
        options={"problems": problems, "variables": variables, "seed": seed},
    )


def jsonl(path: str, *, problems: int | None = None, grader: str = "math") -> Task:
    """A local file with one JSON record per line.

    A record has ``messages``, or ``prompt`` (continued as it is), or ``question`` (a user's turn, to which the usual
    instruction to box the answer is added for graders in `BOXED`); ``answer`` (a text or a number that the grader can
    match); and optionally ``id``.

    Args:
        path: the file.
        problems: number of problems to use, from the first on; all if ``None``.
        grader: a key of `seergate.eval.grading.graders.GRADERS`.
    """
    if not Path(path).is_file():
        raise SeergateError(f"the task file {path} does not exist")
    check_grader(grader)
    if grader == PROGRAM:
        raise SeergateError(f"the grader {PROGRAM!r} is for humaneval only; give another for {path}")
    return Task(
        name=Path(path).stem,
        load=lambda: islice(_records(Path(path), grader), problems),
        grader=grader,
        max_total_tokens=PAPER_LENGTH,
        options={"file": str(path), "problems": problems},
    )


def _records(path: Path, grader: str) -> Iterator[Problem]:
    """The problem in each line; a `SeergateError` names a line that is damaged."""
    for number, record in json_lines(path):
        where = f"{path}, line {number}"
        if not isinstance(record, dict) or "answer" not in record:
            raise SeergateError(f"{where} has no 'answer'")
        try:
            json.dumps(record, ensure_ascii=False).encode()
            problem = _record(record, number, grader)
            check_gold(grader, problem.gold)
        except UnicodeEncodeError as error:
            raise SeergateError(f"{where} holds half a surrogate pair, which is no character: {error}") from error
        except ValueError as error:
            raise SeergateError(f"{where}: {error}") from error
        yield problem


def _record(record: dict[str, Any], number: int, grader: str) -> Problem:
    name = str(number if record.get("id") is None else record["id"])
    gold = as_text("answer", record["answer"])
    if "messages" in record:
        turns = record["messages"]
        good = isinstance(turns, list) and turns and all(map(_is_turn, turns))
        if not good:
            raise ValueError("'messages' must be a list of records with 'role' and 'content', which are texts")
        if turns[-1]["role"] == "assistant":
            raise ValueError("'messages' end with an assistant's turn, which may hold the answer; leave it out")
        return Problem(name, gold, messages=tuple(turns))
    for field in ("prompt", "question"):
        if field in record and not isinstance(record[field], str):
            raise ValueError(f"{field!r} is {record[field]!r}; it must be a text; turns belong in 'messages'")
        if holds_turns(record.get(field, "")):
            raise ValueError(f"{field!r} holds a conversation as JSON text; give it as a list in 'messages'")
    if "prompt" in record:
        if grader in BOXED and "boxed" not in record["prompt"]:
            free = ", ".join(name for name in GRADERS if name not in (*BOXED, PROGRAM))
            raise ValueError(
                f"the prompt does not ask for \\boxed{{}}, in which the grader {grader!r} looks for the answer; ask "
                f"for it, or give another --grader: {free}"
            )
        return Problem(name, gold, prompt=words(record, "prompt"))
    if "question" in record:
        turn = {"role": "user", "content": words(record, "question") + (MATH_INSTRUCTION if grader in BOXED else "")}
        return Problem(name, gold, messages=(turn,))
    raise ValueError("there is none of 'messages', 'prompt' and 'question'")


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, dict) and all(isinstance(turn.get(field), str) for field in ("role", "content"))


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("an integer", is_int),
    "tuple[int, ...]": ("integers", lambda value: isinstance(value, tuple) and all(map(is_int, value))),
    "float": ("a number", is_number),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "str": ("a text", lambda value: isinstance(value, str)),
}
"""Annotation of a task's option -> its type in words, and a check of values."""

TASKS: dict[str, Callable[..., Task]] = {
    "chain_sum": chain_sum,
    "needle": needle,
    "variable_tracking": variable_tracking,
    "perplexity": perplexity,
    "humaneval": humaneval,
    **HUB_TASKS,
}


def make_task(name: str | os.PathLike[str], **options: Any) -> Task:
    """Make a task by name, or from a JSONL file.

    Args:
        name: a key of `TASKS`, optionally with options as ``NAME:OPTION=VALUE:OPTION=VALUE``, which override the
            others; or a path that ends in ``.jsonl``.
        **options: options of the task; ``None`` means the default.

    Raises:
        SeergateError: for an unknown task or option, or a value of another type.
    """
    name, given = os.fspath(name), {key: value for key, value in options.items() if value is not None}
    task, is_file = name.partition(":")[0], name.endswith(LINES)
    is_named = task in TASKS and not (is_file and exists(name))
    if not is_named and not is_file:
        raise SeergateError(f"there is no task {name!r}; {did_you_mean(name, TASKS)} (or give a .jsonl file)")
    make = TASKS[task] if is_named else partial(jsonl, name)
    parameters = inspect.signature(make).parameters.values()
    annotations = {each.name: getattr(each.annotation, "__name__", str(each.annotation)) for each in parameters}
    kinds = {option: annotation.removesuffix(" | None") for option, annotation in annotations.items()}
    lists = [option for option, kind in kinds.items() if kind.startswith("tuple")]
    if is_named:
        name, written = read_options("task", name, lists)
        given |= written
    for unknown in sorted(set(given) - set(kinds)):
        raise SeergateError(f"the task {name!r} has no option {unknown!r}; {did_you_mean(unknown, kinds)}")
    for option in lists:
        if option in given and not isinstance(given[option], tuple):  # in a file: a list, or a single number
            given[option] = tuple(given[option]) if isinstance(given[option], list) else (given[option],)
    for option, value in given.items():
        must, fits = _KINDS.get(kinds[option], ("", lambda value: True))
        if not fits(value):
            raise SeergateError(f"the task's {option} is {value!r}; it must be {must}")
    if "problems" in given:
        check_count("problems", given["problems"], 1)
    return make(**given)
