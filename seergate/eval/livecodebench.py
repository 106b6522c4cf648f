"""Programs for LiveCodeBench's own evaluator, which runs them: seergate generates answers and never executes any.

Its ``custom_evaluator`` reads a JSON list of ``{"question_id": ..., "code_list": [program, ...]}`` with every problem
of the benchmark, and equally many programs for each.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

from seergate.errors import SeergateError
from seergate.eval import store

_TOKENS = r"(?:<[|/\uff5c][^<>\s]*>\s*)*"  # such as <|im_end|>
_FENCE = re.compile(rf"\s*(`{{3,}})([^`]*?){_TOKENS}")
_LATE_FENCE = re.compile(r"[^`]*(`{3,})(\w[^`\s]*)\s*")  # behind a sentence


def last_program(completion: str) -> str:
    """The contents of the last fenced block that is closed; empty if there is none, which is a wrong answer.

    A fence with a word behind it (the language) opens a block even where the model has left another one open; where
    none is open, also at the end of a sentence. End tokens behind a fence do not count.
    """
    found, fence, lines = "", "", list[str]()
    for line in completion.split("\n"):
        match = _FENCE.fullmatch(line) or (None if fence else _LATE_FENCE.fullmatch(line))
        word = match is not None and match[2].strip()
        if match is None or (fence and not word and len(match[1]) < len(fence)):
            lines.append(line)
        elif fence and not word:
            found, fence = "\n".join(lines), ""
        else:
            fence, lines = match[1], []
    return found


def write_programs(directory: Path, out: Path) -> tuple[int, int]:
    """Write a JSON file of a finished run's programs for the evaluator; the run's problem ids are the benchmark's
    question ids. Returns how many problems there are, and how many answers hold no program.

    Raises:
        SeergateError: if answers are missing, without which the evaluator refuses the file.
    """
    config, samples = store.read_config(directory), store.read_samples(directory)
    wanted = config["task"]["n_problems"] * config["generation"]["samples"]
    if len(samples) < wanted:
        raise SeergateError(
            f"{directory} has {len(samples)} of {wanted} answers; let `seergate eval` make the others first"
        )
    programs: dict[str, list[str]] = defaultdict(list)
    for sample in store.in_order(samples):
        programs[sample["problem_id"]].append(last_program(sample["completion"]))
    rows = [{"question_id": name, "code_list": codes} for name, codes in programs.items()]
    store.write_text(out, json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    return len(rows), sum(not code.strip() for codes in programs.values() for code in codes)
