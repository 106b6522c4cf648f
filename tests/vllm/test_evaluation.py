"""`seergate eval --engine vllm`: the answers of the transformers engine, pinned and resumed like its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from seergate import GateBank, SeergateError
from seergate.cli.main import main
from seergate.eval.runner import RunOptions, evaluate
from seergate.eval.settings import MethodSpec
from seergate.eval.tasks import make_task
from tests.vllm.conftest import GATES, REASONER


def samples(directory: Path) -> dict[Any, dict[str, Any]]:
    lines = (directory / "samples.jsonl").read_text().splitlines()
    return {(s["problem_id"], s["sample_idx"]): s for s in map(json.loads, lines)}


def test_answers_are_those_of_the_other_engine(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(REASONER, dtype=torch.float32)
    tokenizer, bank = AutoTokenizer.from_pretrained(REASONER), GateBank.from_pretrained(GATES)
    task = make_task("chain_sum", problems=4, variables=14)
    for spec in (MethodSpec("dense"), MethodSpec("gate", token_budget=160)):
        runs = {}
        for engine in ("transformers", "vllm"):
            out = tmp_path / engine / spec.label
            options = RunOptions(engine=engine, batch_size=4)
            metrics = evaluate(model, tokenizer, task, spec, out, options, bank=bank)
            assert metrics["tokens_per_second"] > 0
            runs[engine] = samples(out)
        assert runs["vllm"].keys() == runs["transformers"].keys()
        for key, sample in runs["vllm"].items():
            for name in ("completion", "correct", "finish_reason", "n_tokens"):
                assert sample[name] == runs["transformers"][key][name]
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert config["generation"]["engine"].startswith("vllm 0.")
    with pytest.raises(SeergateError, match="engine"):  # what vLLM has begun, transformers does not continue
        evaluate(model, tokenizer, task, spec, out, RunOptions(batch_size=4), bank=bank)


def test_traces_are_those_of_the_other_engine(tmp_path: Path) -> None:
    made = {}
    for engine in ("transformers", "vllm"):
        out = tmp_path / f"{engine}.jsonl"
        assert main(["traces", "--prompts", "chain_sum", "--limit", "3", "--engine", engine, "--out", str(out)]) == 0
        made[engine] = sorted(out.read_text().splitlines())
    assert len(made["vllm"]) == 3 and made["vllm"] == made["transformers"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--method", "h2o", "--budget", "128"], "the method 'h2o' does not run inside a server"),
        (["--method", "quest:min_pages=2", "--budget", "128"], "the option 'min_pages' of 'quest' does not exist"),
        (["--method", "dense", "--workers", "1"], "workers is 1; with --engine vllm it must be left out"),
    ],
)
def test_what_vllm_cannot_run_is_refused(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "--no-report", "--engine", "vllm", "--gates", GATES, *arguments]) != 0
    assert sentence in capsys.readouterr().err
