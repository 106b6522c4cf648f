"""The numbers of SeerAttention-R (pass@1, percent), to be drawn beside ours where model and task are the same.

From the published repository's README after its fixes; the figures of the paper differ by up to about two points.
Budgets are tokens per KV head; ``None`` is dense. GPQA-Diamond was run on a file whose right option is always A, so
its numbers stand beside `gpqa_diamond_published` only.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_LONG = (2048, 4096, 6144, 8192, None)
_SHORT = (1024, 2048, 4096, 6144, None)

_PUBLISHED: dict[str, tuple[tuple[int | None, ...], dict[str, tuple[float, ...]]]] = {
    "aime24": (
        _LONG,
        {
            "qwen3-4b": (55.83, 69.32, 70.47, 72.60, 71.25),
            "qwen3-8b": (58.23, 71.35, 74.06, 74.22, 74.48),
            "qwen3-14b": (63.65, 75.73, 78.49, 78.85, 78.91),
            "r1-distill-qwen-14b": (55.97, 66.68, 67.66, 67.45, 67.50),
        },
    ),
    "aime25": (
        _LONG,
        {
            "qwen3-4b": (45.16, 58.59, 61.88, 62.40, 66.41),
            "qwen3-8b": (43.30, 57.81, 63.07, 64.22, 67.86),
            "qwen3-14b": (48.70, 64.79, 68.70, 69.84, 70.21),
            "r1-distill-qwen-14b": (39.37, 48.12, 50.10, 50.42, 50.00),
        },
    ),
    "math500": (
        _SHORT,
        {
            "qwen3-4b": (84.67, 91.85, 94.10, 94.12, 93.93),
            "qwen3-8b": (83.57, 91.67, 94.00, 94.53, 94.43),
            "qwen3-14b": (86.12, 93.02, 95.12, 95.40, 95.22),
            "r1-distill-qwen-14b": (87.35, 92.45, 93.77, 93.40, 93.30),
        },
    ),
    "gpqa_diamond_published": (
        _SHORT,
        {
            "qwen3-4b": (39.84, 49.94, 55.40, 55.90, 56.19),
            "qwen3-8b": (39.43, 54.41, 60.48, 60.57, 60.54),
            "qwen3-14b": (45.64, 61.68, 63.83, 64.33, 65.25),
            "r1-distill-qwen-14b": (52.02, 55.46, 56.34, 57.20, 57.80),
        },
    ),
}

TABLE_1 = {
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

GPU_HOURS_8B = 12
"""Section 5.4 (Table 2): GPU-hours to distil gates for an 8B model on MI300X, 800 steps of 16 packs of 32k tokens."""


def model_key(config: dict[str, Any]) -> str:
    """A model's name as the table has it: ``Qwen/Qwen3-8B`` is ``qwen3-8b``."""
    return re.sub(r"^deepseek-", "", Path(str(config["model"]["path"])).name.lower())


def published(config: dict[str, Any]) -> dict[int | None, float] | None:
    """Budget -> published accuracy of the gate in percent (``None``: dense); ``None`` if model and task differ.

    Args:
        config: of a run. Runs on a part of the problems have nothing to be compared with.
    """
    task = config["task"]
    budgets, models = _PUBLISHED.get(str(task["name"]), ((), {}))
    values = models.get(model_key(config))
    if values is None or task.get("problems") is not None:
        return None
    return dict(zip(budgets, values, strict=True))
