"""`seergate eval --engine vllm`: the answers of the transformers engine, pinned and resumed like its own."""

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from seergate.serving.vllm.generation import answers
from tests.support.reasoner import REASONER
from tests.support.served import REFUSED, check_answers, check_ends, check_refused, check_traces


def test_answers_are_those_of_the_other_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if vLLM has not loaded the plugin, as with VLLM_PLUGINS for others."""
    monkeypatch.setattr(EngineArgs, "create_engine_config", inspect.unwrap(EngineArgs.create_engine_config))
    check_answers("vllm", tmp_path)
    assert vars(EngineArgs.create_engine_config).get("by_seergate")


def test_ends_of_answers(tmp_path: Path) -> None:
    check_ends(answers, tmp_path)


def test_the_process_of_an_engine_ends_with_its_answers() -> None:
    """Its memory would be missing for the next engine. Also if the answers are not waited for."""
    code = f"""
import itertools, multiprocessing
from seergate.serving.common.generation import EngineRun, Prompt
from seergate.serving.vllm.generation import answers
run = EngineRun({REASONER!r}, "float32", 256, 2, None, None, {{"temperature": 0.0}}, [1])
if __name__ == "__main__":
    for wanted in (2, 1):
        made = list(itertools.islice(answers(run, [Prompt([5, 6], 4, 0), Prompt([5, 6], 60, 0)]), wanted))
        assert len(made) == wanted and not multiprocessing.active_children()
"""
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=900)


def test_traces_are_those_of_the_other_engine(tmp_path: Path) -> None:
    check_traces("vllm", tmp_path)


SMALL = (["--method", "quest:block_size=8", "--budget", "128"], "block_size is 8; with seergate it must be")


@pytest.mark.parametrize(("arguments", "sentence"), [*REFUSED, SMALL])
def test_what_vllm_cannot_run_is_refused(arguments: list[str], sentence: str, capsys: Any) -> None:
    check_refused("vllm", arguments, sentence, capsys)
