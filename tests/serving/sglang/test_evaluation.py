"""`seergate eval --engine sglang`: the answers of the transformers engine, pinned and resumed like its own."""

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from seergate import SeergateError
from seergate.eval.sampling import Sampling
from seergate.serving.common.generation import EngineRun, Prompt
from seergate.serving.sglang.generation import answers
from tests.support.served import REFUSED, check_answers, check_ends, check_refused, check_traces


@pytest.mark.timeout(900)
def test_answers_are_those_of_the_other_engine_and_other_processes_live_on(tmp_path: Path) -> None:
    """SGLang kills all children of its process, among which are those that grade."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    check_answers("sglang", tmp_path)
    assert child.poll() is None
    child.communicate()


@pytest.mark.timeout(600)
def test_traces_are_those_of_the_other_engine(tmp_path: Path) -> None:
    check_traces("sglang", tmp_path)


@pytest.mark.timeout(600)
def test_ends_of_answers(tmp_path: Path) -> None:
    check_ends(answers, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [*REFUSED, (["--method", "quest:block_size=4", "--budget", "128"], "--page-size is 4; it is the block of this")],
)
def test_what_sglang_cannot_run_is_refused(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_refused("sglang", arguments, sentence, capsys)


def test_a_penalty_and_a_failure_of_sglang_are_told(tmp_path: Path) -> None:
    for sampling, sentence in (
        (Sampling(repetition_penalty=1.1), "repetition_penalty is 1.1; with --engine sglang"),
        (Sampling(), "SGLang ended with exit status 1"),
    ):
        run = EngineRun(str(tmp_path), "float32", 8, 1, None, None, asdict(sampling), [2])
        with pytest.raises(SeergateError, match=sentence):
            list(answers(run, [Prompt((3,), 4, 0)]))
