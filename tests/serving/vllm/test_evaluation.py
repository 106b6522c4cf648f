"""`seergate eval --engine vllm`: the answers of the transformers engine, pinned and resumed like its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.served import REFUSED, check_answers, check_refused, check_traces


def test_answers_are_those_of_the_other_engine(tmp_path: Path) -> None:
    check_answers("vllm", tmp_path)


def test_traces_are_those_of_the_other_engine(tmp_path: Path) -> None:
    check_traces("vllm", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [*REFUSED, (["--method", "quest:block_size=8", "--budget", "128"], "block_size is 8; with seergate it must be")],
)
def test_what_vllm_cannot_run_is_refused(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_refused("vllm", arguments, sentence, capsys)
