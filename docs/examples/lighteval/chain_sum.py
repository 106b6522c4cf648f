r"""Eight problems of the tiny reasoner's task for lighteval; run it in the root of the checkout::

    python -m seergate.eval.lighteval_adapter --model checkpoints/tiny-reasoner --method h2o:interval=16 --budget 256 \
        --tasks "seergate_chain_sum|0" --custom-tasks docs/examples/lighteval/chain_sum.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from lighteval.metrics.metrics_sample import ExactMatches
from lighteval.metrics.utils.metric_utils import SampleLevelMetric
from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.tasks.requests import Doc, SamplingMethod

from seergate.eval.grading import last_boxed


def doc_of(line: dict[str, Any], task_name: str) -> Doc:
    """One problem."""
    return Doc(task_name=task_name, query=line["question"], choices=[line["answer"]], gold_index=0)


def boxed(text: str) -> str:
    """What the last box holds."""
    return last_boxed(text) or ""


ACCURACY = SampleLevelMetric(
    metric_name="accuracy",
    higher_is_better=True,
    category=SamplingMethod.GENERATIVE,
    sample_level_fn=ExactMatches(normalize_pred=boxed),
    corpus_level_fn=np.mean,  # of a function called mean lighteval knows the standard error; others it bootstraps
)

TASKS_TABLE = [
    LightevalTaskConfig(
        name="seergate_chain_sum",
        prompt_function=doc_of,
        hf_repo=str(Path(__file__).parents[1] / "chain_sum"),
        hf_subset="default",
        hf_avail_splits=["test"],
        evaluation_splits=["test"],
        metrics=[ACCURACY],
        generation_size=256,
        stop_sequence=["<|im_end|>"],
    )
]
