"""A problem's answers side by side: what methods wrote where they do not agree."""

from __future__ import annotations

import re
from collections import defaultdict

from seergate.report.load import Setting, Sweep

TAIL = 400
"""Characters of an answer that are shown: its end, where the result stands."""
SHOWN = 6
"""Settings whose answers are shown."""


def sample_answers(sweep: Sweep) -> list[str]:
    """Markdown blocks: of the problem that settings agree on least, the end of each one's first answer, folded."""
    shown: dict[str, Setting] = {}
    for s in sweep.settings:
        shown.setdefault(s.series, s)  # each series at its smallest budget
    settings = list(shown.values())[:SHOWN]
    first: dict[str, dict[str, dict]] = defaultdict(dict)  # type: ignore[type-arg]
    for s in settings:
        for sample in s.samples:
            first[str(sample["problem_id"])].setdefault(s.label, sample)
    shared = [answers for answers in first.values() if len(answers) == max(map(len, first.values()))]
    answers = min(shared, key=lambda found: abs(sum(bool(a["correct"]) for a in found.values()) - len(found) / 2))
    some = next(iter(answers.values()))
    blocks = [f"Problem {some['problem_id']}, whose answer is {some['gold']}: the end of what each wrote."]
    for label, sample in answers.items():
        verdict = "right" if sample["correct"] else "wrong"
        text = str(sample.get("completion") or "")[-TAIL:]
        text = re.sub("^(?=</?details>)", " ", text.replace("~~~", "~ ~ ~"), flags=re.M)  # the report's own marks
        title = f"{label}: {verdict}, {sample['n_tokens']} tokens, ended by {sample['finish_reason']}"
        blocks += [f"<details><summary>{title}</summary>", f"~~~\n{text}\n~~~", "</details>"]
    return blocks
