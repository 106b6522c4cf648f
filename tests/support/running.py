"""Runs commands and scripts in this process: a new one takes seconds to import torch and transformers.

Here is also what tests ask of a command that succeeds, and of commands and calls that are refused.
"""

import contextlib
import io
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from seergate import SeergateError
from seergate.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Done:
    """How a command ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


@contextlib.contextmanager
def _as_a_process(arguments: list[str]) -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """`sys.argv` and the streams of a process; the number of threads and where modules come from are put back."""
    argv, path, threads = sys.argv, list(sys.path), torch.get_num_threads()
    sys.argv = arguments
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield out, err
    finally:
        sys.argv, sys.path[:] = argv, path
        torch.set_num_threads(threads)


def _code(stop: SystemExit, err: io.StringIO) -> int:
    if isinstance(stop.code, str):
        err.write(stop.code + "\n")
        return 1
    return int(stop.code or 0)


def run_script(script: str, *arguments: str) -> Done:
    """A script of the repository, such as ``benchmarks/decode.py``, as ``python SCRIPT ARGUMENTS`` runs it."""
    with _as_a_process([script, *arguments]) as (out, err):
        sys.path.insert(0, str((ROOT / script).parent))
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
            code = 0
        except SystemExit as stop:
            code = _code(stop, err)
        except Exception:
            err.write(traceback.format_exc())
            code = 1
    return Done(code, out.getvalue(), err.getvalue())


def run_seergate(*arguments: str) -> Done:
    """``seergate ARGUMENTS``."""
    with _as_a_process(["seergate", *arguments]) as (out, err):
        try:
            code = main(list(arguments))
        except SystemExit as stop:  # argparse
            code = _code(stop, err)
    return Done(code, out.getvalue(), err.getvalue())


def output_of(*arguments: str) -> str:
    """What ``seergate ARGUMENTS`` writes; it must succeed."""
    done = run_seergate(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusal(done: Done) -> str:
    """The one sentence of a user error."""
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def refused(message: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Check that ``call(*arguments, **options)`` raises a `SeergateError` of one line that matches the message."""
    with pytest.raises(SeergateError, match=message) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)


def invalid(message: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Check that ``call(*arguments, **options)`` raises a `ValueError` whose message matches this one."""
    with pytest.raises(ValueError, match=message):
        call(*arguments, **options)


@contextlib.contextmanager
def ended_by(error: type[BaseException], module: torch.nn.Module, before: bool = False) -> Iterator[None]:
    """What is called inside ends with this error, which is raised as a call of the module ends, or before it."""

    def fail(*_: Any) -> None:
        raise error

    hook = module.register_forward_pre_hook(fail) if before else module.register_forward_hook(fail)
    with pytest.raises(error):
        yield
    hook.remove()
