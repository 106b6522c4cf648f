"""Published results of SeerAttention-R (pass@1 in percent), which reports show beside runs of the same settings.

Gates and dense: the repository's README after its fixes, which differs from the paper by up to about two points.
Quest: Table 1. Budgets are tokens per KV head; ``None`` is dense. The authors ran GPQA-Diamond on a file in which
option A is always right, so these results are compared with `gpqa_diamond_published` only.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from seergate.eval.tasks.hub_tasks import HUB_TASKS, PAPER_LENGTH
from seergate.methods import Dense, Gate, Quest, method_class

_LONG = (2048, 4096, 6144, 8192, None)
_SHORT = (1024, 2048, 4096, 6144, None)

_BUDGETS = {"aime24": _LONG, "aime25": _LONG, "math500": _SHORT, "gpqa_diamond_published": _SHORT}

_PUBLISHED = {
    ("aime24", "qwen3-4b"): (55.83, 69.32, 70.47, 72.60, 71.25),
    ("aime24", "qwen3-8b"): (58.23, 71.35, 74.06, 74.22, 74.48),
    ("aime24", "qwen3-14b"): (63.65, 75.73, 78.49, 78.85, 78.91),
    ("aime24", "r1-distill-qwen-14b"): (55.97, 66.68, 67.66, 67.45, 67.50),
    ("aime25", "qwen3-4b"): (45.16, 58.59, 61.88, 62.40, 66.41),
    ("aime25", "qwen3-8b"): (43.30, 57.81, 63.07, 64.22, 67.86),
    ("aime25", "qwen3-14b"): (48.70, 64.79, 68.70, 69.84, 70.21),
    ("aime25", "r1-distill-qwen-14b"): (39.37, 48.12, 50.10, 50.42, 50.00),
    ("math500", "qwen3-4b"): (84.67, 91.85, 94.10, 94.12, 93.93),
    ("math500", "qwen3-8b"): (83.57, 91.67, 94.00, 94.53, 94.43),
    ("math500", "qwen3-14b"): (86.12, 93.02, 95.12, 95.40, 95.22),
    ("math500", "r1-distill-qwen-14b"): (87.35, 92.45, 93.77, 93.40, 93.30),
    ("gpqa_diamond_published", "qwen3-4b"): (39.84, 49.94, 55.40, 55.90, 56.19),
    ("gpqa_diamond_published", "qwen3-8b"): (39.43, 54.41, 60.48, 60.57, 60.54),
    ("gpqa_diamond_published", "qwen3-14b"): (45.64, 61.68, 63.83, 64.33, 65.25),
    ("gpqa_diamond_published", "r1-distill-qwen-14b"): (52.02, 55.46, 56.34, 57.20, 57.80),
}
"""(task, model) -> accuracy in percent at the task's budgets."""

_TABLE_1 = {
    ("quest", 2048): (13.3, 30.0),
    ("quest", 4096): (44.2, 22.9),
    ("quest", 6144): (52.5, 19.6),
    ("quest", 8192): (59.6, 17.2),
    ("gate", 2048): (56.6, 19.8),
    ("gate", 4096): (72.3, 16.3),
    ("gate", 6144): (74.2, 15.3),
    ("gate", 8192): (75.1, 15.1),
    ("dense", None): (74.5, 15.1),
}
"""Table 1 (Qwen3-8B, AIME24): (method, budget) -> accuracy in percent, mean length in thousands of tokens."""

BLOCK_SIZE = 64
"""Block size of all published runs (section 4.1), in which every layer is sparse."""

PROBLEMS = {"aime24": 30, "aime25": 30, "math500": 500, "gpqa_diamond_published": 198}
"""Number of problems of the paper's tasks; a local file under the same name may have others."""

_SAMPLING = {"temperature": 0.6, "top_p": 0.95, "top_k": 0, "min_p": 0.0}
"""Sampling of the published code."""

_EITHER_WAY = {"name", "nominal", "token_budget", "block_size", "dense_layers", "compat"}
"""Options that are checked separately, or may have any value: with ``compat`` a gate reads a little more than the
paper says, as the published code does, and both count as the paper's."""


def model_key(config: dict[str, Any]) -> str:
    """A model's name in the tables: ``Qwen/Qwen3-8B`` is ``qwen3-8b``."""
    return re.sub(r"^deepseek-", "", Path(str(config["model"]["path"])).name.lower())


def published(config: dict[str, Any]) -> float | None:
    """The paper's accuracy for a run, in percent; ``None`` if the paper has no number for the run's settings.

    Args:
        config: the run's configuration. A run on part of the problems, with another length limit or without sampling
            is not compared; `deviations` lists the differences that a comparison tolerates.
    """
    method, task = config["method"], config["task"]
    if not _as_published(config):
        return None
    if method["name"] == Quest.name:
        entry = table_1(config)
        return None if entry is None else entry[0]
    values = _PUBLISHED.get((str(task["name"]), model_key(config)))
    budgets = _BUDGETS[task["name"]]
    return None if values is None else dict(zip(budgets, values, strict=True)).get(method.get("token_budget"))


def table_1(config: dict[str, Any]) -> tuple[float, float] | None:
    """Table 1's accuracy in percent and mean length in thousands of tokens for a run; ``None`` as for `published`."""
    if model_key(config) != "qwen3-8b" or config["task"]["name"] != "aime24" or not _as_published(config):
        return None
    return _TABLE_1.get((config["method"]["name"], config["method"].get("token_budget")))


def deviations(config: dict[str, Any]) -> list[str]:
    """How a run that has a published number differs from the paper's run, in words."""
    generation, samples = config["generation"], HUB_TASKS[config["task"]["name"]].samples
    differences = [] if generation["samples"] == samples else [f"samples {generation['samples']} instead of {samples}"]
    if config["method"]["name"] == Quest.name and config["method"]["group_reduction"] != "separate":
        differences.insert(0, "pages chosen per KV head, not query head")
    for name, theirs in _SAMPLING.items():
        ours = generation.get(name, theirs)
        if ours != theirs:
            differences.append(f"{name.replace('_', '-')} {ours:g} instead of {theirs:g}")
    return differences


def _as_published(config: dict[str, Any]) -> bool:
    """True if a run has the paper's settings: all problems, its length limit, sampling; and dense attention, or gates
    or Quest with a token budget, blocks of 64 tokens, no dense layers and all other options at their defaults.
    """
    task, generation, method = (config[section] for section in ("task", "generation", "method"))
    name = method["name"]
    if "shots" in task:  # another prompt than the paper's
        return False
    if task.get("problems") is not None or task.get("n_problems", 0) != PROBLEMS.get(str(task["name"])):
        return False
    grader, longest = HUB_TASKS[task["name"]].grader, generation.get("max_new_tokens") or PAPER_LENGTH
    sampled = generation["temperature"] > 0 and generation.get("max_total_tokens") == PAPER_LENGTH <= longest
    if not sampled or task.get("grader", grader) != grader or name not in (Dense.name, Gate.name, Quest.name):
        return False
    if name == Dense.name or method.get("token_budget") is None:
        return bool(name == Dense.name)
    defaults = {f.name: f.default for f in fields(method_class(name))} | {"sink_blocks": 0}
    if name == Quest.name and method.get("group_reduction") == "separate":  # the paper's; `deviations` reports others
        defaults["group_reduction"] = "separate"
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in method.items()}
    plain = all(key in _EITHER_WAY or (key in defaults and value == defaults[key]) for key, value in given.items())
    return plain and method.get("block_size") == BLOCK_SIZE and not method.get("dense_layers")
