"""The resolved configuration of a run: everything that shapes its results, as plain YAML types."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from seergate.eval.engine import Limit, encode, end_ids, prompt_text
from seergate.eval.environment import environment, grader_version
from seergate.eval.sampling import Sampling
from seergate.eval.settings import MethodSpec
from seergate.eval.task import Problem, Task, contents_hash, prompts_hash
from seergate.fingerprint import fingerprint, rope_of
from seergate.hf.bank import GateBank


def run_config(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    problems: list[Problem],
    spec: MethodSpec,
    bank: GateBank | None,
    *,
    samples: int,
    limit: Limit,
    sampling: Sampling,
    seed: int,
    model_name: str = "",
    gates_name: str = "",
    engine: str | None = None,
    execution: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The contents of `config.yaml`.

    Args:
        model, tokenizer, task, problems, spec, bank: what is evaluated.
        samples: per problem.
        limit, sampling, seed: how answers are generated.
        model_name, gates_name: paths or Hub ids.
        engine: what generates, with its version; ``None`` for transformers.
        execution: how it was run, as far as that does not shape results.
    """
    gates = None
    if spec.has_gates and bank is not None:
        gates = {"path": gates_name, "fingerprint": fingerprint(bank)}
    return {
        "task": {
            "name": task.name,
            **task.options,
            "n_problems": len(problems),
            "grader": task.grader,
            "chance": task.chance,
            "contents": contents_hash(problems),
            "prompts": prompts_of(tokenizer, problems),
        },
        "method": spec.describe(bank),
        "model": {
            "path": model_name or str(model.config.name_or_path),
            "type": model.config.model_type,
            "parameters": sum(p.numel() for p in model.parameters()),
            "dtype": str(model.dtype).removeprefix("torch."),
            "fingerprint": fingerprint(model),
            "rope": rope_of(model),
        },
        "gates": gates,
        "generation": {
            "samples": samples,
            "max_new_tokens": limit.new_tokens,
            "max_total_tokens": limit.total_tokens,
            **asdict(sampling),
            "seed": seed,
            "ends": sorted(end_ids(model, tokenizer)),
            **({"engine": engine} if engine is not None else {}),
        },
        "environment": environment(model.device) | grader_version(task.grader),
        "execution": {"threads": torch.get_num_threads(), **(execution or {})},
    }


def prompts_of(tokenizer: PreTrainedTokenizerBase, problems: list[Problem]) -> str:
    """`prompts_hash` of what a tokenizer, with its chat template, makes of problems."""
    return prompts_hash(encode(tokenizer, prompt_text(tokenizer, problem)) for problem in problems)
