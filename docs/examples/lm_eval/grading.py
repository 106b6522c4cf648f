"""What the example task of lm-eval grades with: the digit in the last box, as `seergate eval` does."""

from __future__ import annotations

from typing import Any

from seergate.eval.grading.graders import last_boxed


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """The metrics of one answer."""
    return {"accuracy": float(last_boxed(results[0]) == doc["answer"])}
