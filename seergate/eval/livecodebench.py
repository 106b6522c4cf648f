"""Export of generated programs to LiveCodeBench's own evaluator, which runs them; seergate never executes any.

LiveCodeBench's ``custom_evaluator`` reads a JSON list of ``{"question_id": ..., "code_list": [program, ...]}`` with
every problem of the benchmark and the same number of programs for each.
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
_LATE_FENCE = re.compile(r"[^`]*(`{3,})(\w[^`\s]*)\s*")  # after a sentence


def last_program(completion: str) -> str:
    """The contents of the last closed fenced block; empty if there is none, which counts as a wrong answer.

    A fence followed by a word (the language) opens a block even if the model left another one open; if none is open,
    the fence may also stand at the end of a sentence. End tokens after a fence are ignored.
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
    """Write the programs of a finished run to a JSON file for the evaluator; the run's problem ids must be question
    ids. Return the number of problems, and the number of answers without a program.

    Raises:
        SeergateError: if answers are missing, because the evaluator refuses an incomplete file.
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
