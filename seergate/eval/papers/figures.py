"""The figures and tables of five papers that `seergate figure` reproduces, as data: the settings for the tiny reasoner
and for a real model, the presentation, and the published numbers.

Settings are fields of a sweep (`seergate.eval.sweep_plan.SweepPlan`). For a real model they follow the paper where it
states them, also for its variants of methods: Quest selects pages of 16 tokens per query head, RaaS counts the prompt
in its budget, H2O and TOVA evict at every step. The tiny reasoner's contexts are about twenty times shorter, so its
budgets, windows and intervals are smaller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One figure or table of a paper.

    Attributes:
        source: the figure and its paper, such as ``"Figure 5 of RaaS"``.
        title: what is compared.
        style: its presentation: a key of `seergate.eval.papers.styles.STYLES`.
        tiny, real: settings of the sweep, for the tiny reasoner and for other models.
        published: (model, task) -> directory of a run -> the paper's accuracy in percent. SeerAttention-R's numbers
            are in `seergate.eval.report.published`.
        caution: a caveat of the paper's numbers.
    """

    source: str
    title: str
    style: str
    tiny: dict[str, Any]
    real: dict[str, Any]
    published: Mapping[tuple[str, str], Mapping[str, float]] = field(default_factory=dict)
    caution: str = ""


SEER = "SeerAttention-R"

TINY_BUDGETS = [32, 64, 128]
PROMPT_AND_ANSWER = [128, 256, 512, 768]
"""Budgets that include the prompt, which for 30 variables has about 420 tokens and fills the first two."""

QUEST = "quest:block_size=16:group_reduction=separate"
TINY_QUEST = "quest:block_size=8:group_reduction=separate"

RPC_RUN = {"task": "aime24", "temperature": 0.6, "top_p": 0.95, "max_new_tokens": 32768}
QWEN_7B, QWQ, LLAMA_8B = "r1-distill-qwen-7b", "qwq-32b", "r1-distill-llama-8b"
MATH = {"task": "math500", "temperature": 0.0, "max_new_tokens": 8192, "samples": 1}
TINY_LAZY = "lazy_eviction:window=8:alpha=0.01"
TINY_RIVALS = ["dense", "raas:block_size=8", "h2o:interval=8", "tova:interval=8", "r_kv:interval=8:window=8"]
SCRIPT_BUDGET = "The budget is that of the authors' script for this model and task; the paper's tables name a ratio."

SHARING = "border=next:block_size=4:warm_up=4"
"""Options of ReasonCache for the tiny reasoner's text, whose steps begin with the word "next"."""
CONTROL = ["dense", "reason_cache", "random_sharing"]
PARTS = ["reason_cache:percentile=100:structural_check=false", "reason_cache:percentile=100", "reason_cache"]
PERCENTILES = [f"reason_cache:percentile={p}" for p in (20, 50, 80, 100)]
R1_32B, PHI = "r1-distill-qwen-32b", "phi-4-reasoning-plus"


def _sharing(methods: list[str]) -> list[str]:
    """Add `SHARING`, the options for the tiny reasoner, to all methods but dense."""
    return [text if text == "dense" else f"{text}:{SHARING}" for text in methods]


def _by_task(model: str, methods: list[str], **tasks: list[float]) -> dict[tuple[str, str], dict[str, float]]:
    """Rows of a table whose columns are tasks."""
    labels = [text.replace(":", "-") for text in methods]
    return {(model, task): dict(zip(labels, numbers, strict=True)) for task, numbers in tasks.items()}


_TABLE_I = {
    **_by_task(R1_32B, CONTROL, aime24=[73.3, 70.0, 36.7], aime25=[53.3, 50.0, 20.0],
               math500=[92.7, 91.8, 60.0], gpqa_diamond=[63.1, 60.7, 32.3]),
    **_by_task(QWQ, CONTROL, aime24=[76.6, 73.3, 30.0], aime25=[63.3, 63.3, 23.3],
               math500=[89.4, 87.2, 58.8], gpqa_diamond=[61.1, 58.1, 27.8]),
    **_by_task(PHI, CONTROL, aime24=[80.0, 80.0, 33.3], aime25=[67.7, 63.3, 13.3],
               math500=[89.3, 90.3, 49.2], gpqa_diamond=[52.0, 50.8, 20.3]),
}  # fmt: skip

FIGURES: dict[str, Figure] = {
    # ------------------------------------------------------------------------------------------- SeerAttention-R
    "4": Figure(
        f"Figure 4 of {SEER}", "Oracle selection by block size and budget", "spread",
        {"method": ["dense", "oracle"], "block_size": [8, 16, 32], "budget": [64, 128, 256]},
        {"method": ["dense", "oracle"], "block_size": [32, 64, 128], "budget": [1024, 2048, 4096, 8192]},
    ),
    "5": Figure(
        f"Figure 5 of {SEER}", "Accuracy against token budget", "by_budget",
        {"method": ["dense", "gate", "quest"], "budget": [32, 64, 128, 256]},
        {"method": ["dense", "gate", "quest"]},
    ),
    "7": Figure(
        f"Figure 7 of {SEER}", "Accuracy against block size", "by_block_size",
        {"method": ["dense", "gate", "quest"], "block_size": [8, 16, 32], "budget": [64, 128]},
        {"method": ["dense", "gate", "quest"], "block_size": [16, 32, 64, 128], "budget": [4096]},
    ),
    "8": Figure(
        f"Figure 8 of {SEER}", "First layers dense, or all sparse", "spread",
        {"method": ["dense", "gate", "quest"], "budget": TINY_BUDGETS, "dense_layers": [[], [0]]},
        {"method": ["dense", "gate", "quest"], "budget": [2048, 4096, 6144, 8192], "dense_layers": [[], [0, 1]]},
    ),
    "9": Figure(
        f"Figure 9 of {SEER}", "Threshold against token budget", "by_threshold",
        {"method": ["dense", "gate"], "budget": TINY_BUDGETS, "threshold": [0.003, 0.01, 0.03, 0.1]},
        {"method": ["dense", "gate"], "budget": [2048, 4096, 6144, 8192], "threshold": [0.001, 0.002, 0.004, 0.008]},
    ),
    "table1": Figure(
        f"Table 1 of {SEER}", "Accuracy and length of the reasoning", "length_table",
        {"method": ["dense", "gate", "quest"], "budget": TINY_BUDGETS},
        {"method": ["dense", "gate", "quest"], "budget": [2048, 4096, 6144, 8192]},
    ),
    # ------------------------------------------------------------------------------------------------------ RaaS
    "raas5": Figure(
        "Figure 5 of RaaS", "Accuracy against cache budget", "by_budget",
        {"method": ["dense", TINY_QUEST, "streaming_llm:interval=8", "h2o:interval=8", "raas:block_size=8"],
         "budget": PROMPT_AND_ANSWER},
        {"method": ["dense", QUEST, "streaming_llm", "h2o", "raas"], "budget": [64, 128, 256, 512, 1024],
         "task": "math500", "task_options": {"problems": 200}},
    ),
    # ------------------------------------------------------------------------------------------------------- RPC
    "rpc8": Figure(
        "Figure 8 of RPC", "Compression interval", "costs",
        {"method": ["dense", *(f"rpc:interval={n}:window=8" for n in (4, 16, 64, 128))]},
        {"method": ["dense", *(f"rpc:interval={4**n}" for n in range(1, 8))], **RPC_RUN},
        {(QWEN_7B, "aime24"): {"dense": 55.5, "rpc-interval=4096": 52.9, "rpc-interval=1024": 50.4}},
    ),
    "rpc-table1": Figure(
        "Table 1 of RPC", "RPC and evictors with a quarter of the mean length", "costs",
        {"method": ["dense", "h2o:interval=8", "tova:interval=8", "rpc:interval=64:window=8"], "budget": [96]},
        {"method": ["dense", "h2o", "tova", "rpc:interval=4096", "rpc:interval=1024"], "budget": [3417], **RPC_RUN},
        {
            (QWEN_7B, "aime24"): {"dense": 55.5, "h2o-3417": 42.5, "tova-3417": 42.5, "rpc-interval=4096": 52.9,
                                  "rpc-interval=1024": 50.4},
            (QWQ, "aime24"): {"dense": 79.5, "rpc-interval=4096": 78.3, "rpc-interval=1024": 78.3},
        },
        "A quarter of the mean length is 3417 tokens for R1-Distill-Qwen-7B (Table 3 of RPC).",
    ),
    "rpc-table2": Figure(
        "Table 2 of RPC", "Size of the selector window", "costs",
        {"method": ["dense", *(f"rpc:interval=64:window={n}" for n in (1, 8, 32))]},
        {"method": ["dense", *(f"rpc:interval={p}:window={n}" for p in (4096, 1024) for n in (1, 8, 32, 128))],
         **RPC_RUN},
        {(QWEN_7B, "aime24"): {
            "dense": 55.5, "rpc-interval=4096-window=1": 49.2, "rpc-interval=4096-window=8": 48.3,
            "rpc-interval=4096-window=32": 52.9, "rpc-interval=4096-window=128": 49.2,
            "rpc-interval=1024-window=1": 45.8, "rpc-interval=1024-window=8": 49.2,
            "rpc-interval=1024-window=32": 50.4, "rpc-interval=1024-window=128": 50.0,
        }},
    ),
    "rpc-table4": Figure(
        "Table 4 of RPC", "One decision for a layer, or one for each group of heads", "costs",
        {"method": ["dense", *(f"rpc:interval=64:window=8:scope={scope}" for scope in ("layer", "kv_head"))]},
        {"method": ["dense", *(f"rpc:interval={p}:scope={s}" for p in (4096, 1024) for s in ("layer", "kv_head"))],
         **RPC_RUN},
        {(QWEN_7B, "aime24"): {
            "dense": 55.5, "rpc-interval=4096-scope=layer": 52.9, "rpc-interval=4096-scope=kv_head": 50.8,
            "rpc-interval=1024-scope=layer": 50.4, "rpc-interval=1024-scope=kv_head": 50.4,
        }},
    ),
    # ---------------------------------------------------------------------------------------------- LazyEviction
    "lazy5": Figure(
        "Figure 5 of LazyEviction", "Accuracy against budget", "by_budget",
        {"method": [*TINY_RIVALS, TINY_LAZY], "budget": PROMPT_AND_ANSWER},
        {"method": ["dense", "raas", "h2o", "tova", "r_kv", "lazy_eviction:window=auto"],
         "budget": [512, 1024, 1536, 2048], **MATH},
    ),
    "lazy-table1": Figure(
        "Table 1 of LazyEviction", "LazyEviction and other evictors", "costs",
        {"method": [*TINY_RIVALS, TINY_LAZY], "budget": [512]},
        {"method": ["dense", "raas", "h2o:recent_tokens=175", "tova", "r_kv", "lazy_eviction"], "budget": [1492],
         **MATH},
        {
            (QWEN_7B, "math500"): {"dense": 86.0, "raas-1492": 82.4, "h2o-1492-recent_tokens=175": 80.4,
                                   "tova-1492": 74.8, "r_kv-1492": 83.6, "lazy_eviction-1492": 85.4},
            (LLAMA_8B, "math500"): {"dense": 74.8}, ("qwen3-4b", "math500"): {"dense": 87.2},
            (QWQ, "math500"): {"dense": 87.2}, (QWEN_7B, "gsm8k"): {"dense": 89.92},
            (LLAMA_8B, "gsm8k"): {"dense": 81.73}, ("qwen3-4b", "gsm8k"): {"dense": 93.32},
            (QWQ, "gsm8k"): {"dense": 95.61},
        },
        SCRIPT_BUDGET,
    ),
    "lazy-table9": Figure(
        "Table 9 of LazyEviction", "The window", "costs",
        {"method": ["dense", *(f"lazy_eviction:alpha=0.01:window={w}" for w in (4, 8, 16, 32))], "budget": [512]},
        {"method": ["dense", *(f"lazy_eviction:alpha=0.0005:window={w}" for w in (8, 16, 32, 52, 64))],
         "budget": [1334], **MATH},
        {(LLAMA_8B, "math500"): {
            "dense": 74.8, "lazy_eviction-1334-alpha=0.0005-window=8": 71.8,
            "lazy_eviction-1334-alpha=0.0005-window=16": 72.2, "lazy_eviction-1334-alpha=0.0005-window=32": 72.8,
            "lazy_eviction-1334-alpha=0.0005-window=52": 75.2, "lazy_eviction-1334-alpha=0.0005-window=64": 74.8,
        }},
        SCRIPT_BUDGET,
    ),
    # ----------------------------------------------------------------------------------------------- ReasonCache
    "reasoncache7": Figure(
        "Figure 7 of ReasonCache", "A threshold that adapts, and fixed ones", "costs",
        {"method": _sharing(["dense", "reason_cache", *(f"reason_cache:strict={t}:soft={t}" for t in (0.7, 0.9))])},
        {"method": ["dense", "reason_cache", *(f"reason_cache:strict={t}:soft={t}" for t in (0.7, 0.8, 0.9))]},
        _TABLE_I,
    ),
    "reasoncache-table1": Figure(
        "Table I of ReasonCache", "Accuracy and throughput", "costs",
        {"method": _sharing(CONTROL)}, {"method": CONTROL}, _TABLE_I,
    ),
    "reasoncache-table2": Figure(
        "Table II of ReasonCache", "Sharing, evicting and reading a part", "costs",
        {"method": ["dense", "streaming_llm:interval=8", "snapkv:window=8:compress=prompt",
                    TINY_QUEST, *_sharing(["reason_cache"])],
         "budget": [512]},
        {"method": ["dense", "streaming_llm", "snapkv:compress=prompt", QUEST, "reason_cache"],
         "budget": [2048, 8192]},
        _TABLE_I,
        "The paper gives the others budgets at which they save as much memory as sharing, and does not name them.",
    ),
    "reasoncache-table3": Figure(
        "Table III of ReasonCache", "Parts of the filter", "costs",
        {"method": _sharing(["dense", *PARTS])}, {"method": ["dense", *PARTS], "task": "math500"},
        {
            **_by_task(R1_32B, PARTS, math500=[78.0, 82.2, 91.8], gpqa_diamond=[50.5, 55.6, 60.7]),
            **_by_task(QWQ, PARTS, math500=[75.2, 80.0, 87.2], gpqa_diamond=[48.0, 53.2, 58.1]),
            **_by_task(PHI, PARTS, math500=[79.2, 85.0, 90.3], gpqa_diamond=[40.4, 44.9, 50.8]),
        },
    ),
    "reasoncache-table4": Figure(
        "Table IV of ReasonCache", "Percentile of the threshold, p", "costs",
        {"method": _sharing(["dense", *PERCENTILES])}, {"method": ["dense", *PERCENTILES], "task": "math500"},
        {
            **_by_task(R1_32B, PERCENTILES, math500=[92.4, 92.2, 91.8, 82.2]),
            **_by_task(QWQ, PERCENTILES, math500=[87.8, 86.8, 87.2, 80.0]),
            **_by_task(PHI, PERCENTILES, math500=[89.3, 89.6, 90.3, 85.0]),
        },
    ),
}  # fmt: skip
