"""The graders on gold answers: taken as they stand and rewritten, refused when changed.

Rewritings are those that a model makes: another fraction macro, other brackets, spaces, units, a degree sign. On the
Hub's files, in the tests marked `hub`, at least 99.5 % have to be judged rightly.
"""

import re

import pytest

from seergate.eval.grading.judge import GradingPool
from seergate.eval.tasks.hub_tasks import HUB_TASKS
from seergate.eval.tasks.registry import make_task

SHARE = 0.995
"""Of the gold answers that has to be judged rightly."""


@pytest.fixture(scope="module")
def judges():
    with GradingPool() as pool:
        yield pool


def perturbed(gold: str) -> str:
    r"""Another answer: its first digit is one larger (a 9 one smaller), else its last letter is the next one.

    No macro's name is changed. (The first digit, as the last one may be a unit's exponent.)
    """
    digit = re.search(r"\d", gold)
    if digit:
        other = str(int(digit[0]) + 1 if digit[0] != "9" else 8)
        return gold[: digit.start()] + other + gold[digit.end() :]
    letters = [match for match in re.finditer(r"(\\[A-Za-z]+)|[A-Za-z]", gold) if match[1] is None]
    if not letters:
        return "2" + gold
    at = letters[-1].start()
    return (
        gold[:at] + ("a" if gold[at] == "z" else "A" if gold[at] == "Z" else chr(ord(gold[at]) + 1)) + gold[at + 1 :]
    )


def growing(gold: str) -> str:
    closed = re.sub(r"(?<!\\right)\)", r" \\right)", gold)
    return gold if "{(" in gold else re.sub(r"(?<!\\left)\(", r"\\left( ", closed)


REWRITINGS = {
    "as it is": lambda gold: gold,
    "displayed fractions": lambda gold: gold.replace(r"\frac", r"\dfrac"),
    "text fractions": lambda gold: gold.replace(r"\frac", r"\tfrac"),
    "growing brackets": growing,
    "spaces around": lambda gold: f" {gold} ",
    "dollars around": lambda gold: f"${gold}$",
}


WRITTEN_OTHERWISE = r"""
    \frac{1}{2} == \tfrac12 || \frac{1}2 || \dfrac 1{2} || 1/2 || .5
    \left( 3, \frac{\pi}{2} \right) == (3, \frac{\pi}{2}) || (3,\dfrac\pi2)    (-\infty, 2) == \left(-\infty,2\right)
    [-2,7] == \left[-2, 7\right] || x \in [-2,7]    90^\circ == 90 || 90° || 90^{\circ} || 90\text{ degrees}
    90 == 90° || 90^\circ || 90\degree
    5 == 5 cm || 5\text{ cm} || 5\,\mathrm{cm}^2 || 5 \text{ square units} || x = 5 || 5. || 5.0
    5\text{ cm}^2 == 5 || 5\ \text{cm}^2    10,\!080 == 10080 || 10,080 || 10{,}080
    \$18.90 == 18.90 || 18.9 || \$18.9    50\% == 50 || 50%    \text{Evelyn} == Evelyn || \textbf{Evelyn}
    \text{(C)} == C || (C) || \text{C}    1,3,5 == 1, 3, 5 || 5,3,1 || \{1,3,5\}
    1 \pm \sqrt{19} == 1\pm\sqrt{19} || 1+\sqrt{19}, 1-\sqrt{19}
    \begin{pmatrix} 1 \\ 2 \end{pmatrix} == \begin{bmatrix}1\\2\end{bmatrix}    2516_8 == 2516_{8}
"""


@pytest.mark.parametrize("line", re.split(r"\n? {4}", WRITTEN_OTHERWISE.strip()))
def test_gold_answers_written_otherwise(judges, line):
    gold, _, answers = line.partition(" == ")
    for answer in [gold, *answers.split(" || ")]:
        grade = judges.grade("math", f"so \\boxed{{{answer}}}", gold)
        assert grade.correct, (answer, grade.reason)
        wrong = judges.grade("math", f"so \\boxed{{{perturbed(answer)}}}", gold)
        assert not wrong.correct, (perturbed(answer), wrong.reason)


def misjudged(judges, grader, golds, change, right):
    """Of these gold answers, changed so, the wrongly judged ones."""
    grades = judges.grade_all([(grader, f"so \\boxed{{{change(gold)}}}", gold) for gold in golds])
    return [(gold, change(gold), g.reason) for gold, g in zip(golds, grades, strict=True) if g.correct is not right]


@pytest.mark.hub
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [name for name in HUB_TASKS if name != "gpqa_diamond"])  # which needs a login
def test_gold_answers_of_the_hub(judges, name):
    task = make_task(name)
    golds = [problem.gold for problem in task.problems()]
    for rewriting, change in REWRITINGS.items():
        refused = misjudged(judges, task.grader, golds, change, right=True)
        assert len(refused) <= (1 - SHARE) * len(golds), (rewriting, refused)
    false_accepts = misjudged(judges, task.grader, golds, perturbed, right=False)
    assert len(false_accepts) <= (1 - SHARE) * len(golds), false_accepts
