"""Run as a process of its own by test_runner.py, which kills it: python -m tests.eval.killed_run MODEL OUT."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from seergate.eval import MethodSpec, RunOptions, Sampling, environment, evaluate, make_task

TASK = {"problems": 12, "variables": 6, "seed": 3}
OPTIONS = RunOptions(samples=2, max_new_tokens=40, batch_size=2, seed=5, sampling=Sampling(temperature=1.0))
SPEC = MethodSpec("oracle", token_budget=32, block_size=16)


def run(model: str, out: str) -> dict:
    torch.set_num_threads(1)
    loaded = AutoModelForCausalLM.from_pretrained(model).eval()
    arguments = loaded, AutoTokenizer.from_pretrained(model), make_task("chain_sum", **TASK), SPEC, Path(out), OPTIONS
    # A run is refused once the code it began with has changed, and somebody may commit while fifty are killed.
    with mock.patch.object(environment, "git_revision", return_value=None):
        return evaluate(*arguments)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2])
