"""Tests of `--engine` that are the same for every server."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from seergate import GateBank
from seergate.cli.main import main
from seergate.eval.run_config import RunOptions
from seergate.eval.runner import evaluate
from seergate.eval.sampling import Sampling
from seergate.eval.settings import MethodSpec
from seergate.eval.store import key_of, read_samples
from seergate.eval.tasks.prompts import encode, prompt_text
from seergate.eval.tasks.registry import make_task
from seergate.serving.common.generation import Answers, EngineRun, Prompt
from tests.support.reasoner import GATES, REASONER
from tests.support.running import refused

REFUSED = [
    (["--method", "h2o", "--budget", "128"], "the method 'h2o' does not run inside a server"),
    (["--method", "quest:min_pages=2", "--budget", "128"], "the option 'min_pages' of 'quest' does not exist"),
    (["--method", "dense", "--workers", "1"], "workers is 1; with --engine {} it must be left out"),
    (["--method", "dense", "--ray-address", "auto"], "ray_address is 'auto'; with --engine {} it must be left out"),
]
"""Arguments of `seergate eval` that no server runs, and what is said."""


def check_refused(server: str, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`seergate eval` refuses arguments before it loads the model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seergate.eval.run_plan.load_model", lambda *_: pytest.fail("refused only after the model"))
        assert main(["eval", "--no-report", "--engine", server, "--gates", GATES, *arguments]) != 0
    assert sentence.format(server) in capsys.readouterr().err


def check_answers(server: str, out: Path) -> None:
    """The answers are those of the engine of transformers, which does not continue what the server has begun."""
    model = AutoModelForCausalLM.from_pretrained(REASONER, dtype=torch.float32)
    tokenizer, bank = AutoTokenizer.from_pretrained(REASONER), GateBank.from_pretrained(GATES)
    task = make_task("chain_sum", problems=4, variables=14)
    for spec in (MethodSpec("dense"), MethodSpec("gate", token_budget=160)):
        runs = {}
        for engine in ("transformers", server):
            directory = out / engine / spec.label
            options = RunOptions(engine=engine, batch_size=4)
            metrics = evaluate(model, tokenizer, task, spec, directory, options, bank=bank)
            assert metrics["tokens_per_second"] > 0
            runs[engine] = {key_of(sample): sample for sample in read_samples(directory)}
        assert runs[server].keys() == runs["transformers"].keys()
        for key, sample in runs[server].items():
            for name in ("completion", "correct", "finish_reason", "n_tokens"):
                assert sample[name] == runs["transformers"][key][name]
    config = yaml.safe_load((directory / "config.yaml").read_text())
    assert config["generation"]["engine"].startswith(f"{server} 0.")
    refused("engine", evaluate, model, tokenizer, task, spec, directory, RunOptions(batch_size=4), bank=bank)


def check_ends(answers: Callable[[EngineRun, list[Prompt]], Answers], directory: Path) -> None:
    """Only the tokens of ``ends`` end an answer, which may be short and fill the model's positions."""
    model = shutil.copytree(REASONER, directory / "model", ignore=shutil.ignore_patterns("gates*", "*.jsonl"))
    generation = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": 1}))
    tokenizer = AutoTokenizer.from_pretrained(model)
    (problem,) = make_task("chain_sum", problems=1, variables=4).problems()
    ids = tuple(encode(tokenizer, prompt_text(tokenizer, problem)))
    positions = AutoConfig.from_pretrained(model).max_position_embeddings
    long = (ids * positions)[: positions - 1]
    run = EngineRun(str(model), "float32", positions, 2, None, None, asdict(Sampling(temperature=0.0)), [1])
    made = {number: tokens for number, tokens, _ in answers(run, [Prompt(ids, 200, 0), Prompt(long, 1, 0)])}
    assert [len(made[number]) for number in (0, 1)] == [200, 1]
    assert tokenizer.eos_token_id in made[0]


def check_traces(server: str, directory: Path) -> None:
    """`seergate traces` writes the rows of the engine of transformers."""
    made = {}
    for engine in ("transformers", server):
        out = directory / f"{engine}.jsonl"
        assert main(["traces", "--prompts", "chain_sum", "--limit", "3", "--engine", engine, "--out", str(out)]) == 0
        made[engine] = sorted(out.read_text().splitlines())
    assert len(made[server]) == 3 and made[server] == made["transformers"]
