"""Worked examples before a question: as one text for base models, or as turns of a conversation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from seergate.eval.tasks.task import Problem, as_text, words

Example = tuple[str, str]
"""A question, and its solution with the answer in a box."""

STOP = "\nQuestion:"
"""The text with which a base model would go on to a question of its own."""


def gsm8k_answer(record: dict[str, Any]) -> tuple[str, str]:
    """Solution and final answer in a record of GSM8K."""
    solution, marker, gold = as_text("answer", record["answer"]).rpartition("####")
    if not marker:
        raise ValueError("'answer' has no '####', behind which the final answer must stand")
    return solution, gold.strip().replace(",", "")


def gsm8k_example(record: dict[str, Any], number: int) -> Example:
    """An example from a record of GSM8K's training set, without the notes of a calculator (``<<48/2=24>>``)."""
    solution, gold = gsm8k_answer(record)
    steps = re.sub(r"<<.*?>>", "", solution).strip()
    return words(record, "question").strip(), f"{steps}\nThe answer is \\boxed{{{gold}}}."


def math_example(record: dict[str, Any], number: int) -> Example:
    """An example from a record of MATH, whose solutions box the answer."""
    solution = words(record, "solution")
    if "boxed" not in solution:
        raise ValueError("'solution' has no \\boxed{}, in which the final answer must stand")
    return words(record, "problem").strip(), solution.strip()


MINERVA: Sequence[Example] = (
    (
        r"Find the domain of the expression  $\frac{\sqrt{x-2}}{\sqrt{5-x}}$.",
        r"The expressions inside each square root must be non-negative. Therefore, $x-2 \ge 0$, so $x\ge2$, and "
        r"$5 - x \ge 0$, so $x \le 5$. Also, the denominator cannot be equal to zero, so $5-x>0$, which gives $x<5$. "
        r"Therefore, the domain of the expression is $\boxed{[2,5)}$.",
    ),
    (
        r"If $\det \mathbf{A} = 2$ and $\det \mathbf{B} = 12,$ then find $\det (\mathbf{A} \mathbf{B}).$",
        r"We have that $\det (\mathbf{A} \mathbf{B}) = (\det \mathbf{A})(\det \mathbf{B}) = (2)(12) = \boxed{24}.$",
    ),
    (
        "Terrell usually lifts two 20-pound weights 12 times. If he uses two 15-pound weights instead, how many "
        "times must Terrell lift them in order to lift the same total weight?",
        r"If Terrell lifts two 20-pound weights 12 times, he lifts a total of $2\cdot 12\cdot20=480$ pounds of "
        r"weight.  If he lifts two 15-pound weights instead for $n$ times, he will lift a total of "
        r"$2\cdot15\cdot n=30n$ pounds of weight.  Equating this to 480 pounds, we can solve for $n$:"
        "\n\\begin{align*}\n30n&=480\\\\\n\\Rightarrow\\qquad n&=480/30=\\boxed{16}\n\\end{align*}",
    ),
    (
        "If the system of equations\n\n\\begin{align*}\n6x-4y&=a,\\\\\n6y-9x &=b.\n\\end{align*}has a solution "
        "$(x, y)$ where $x$ and $y$ are both nonzero,\nfind $\\frac{a}{b},$ assuming $b$ is nonzero.",
        "If we multiply the first equation by $-\\frac{3}{2}$, we obtain\n\n$$6y-9x=-\\frac{3}{2}a.$$Since we also "
        "know that $6y-9x=b$, we have\n\n$$-\\frac{3}{2}a=b\\Rightarrow\\frac{a}{b}=\\boxed{-\\frac{2}{3}}.$$",
    ),
)
"""The problems and solutions of Minerva's prompt (Lewkowycz et al., 2022, arXiv:2206.14858, D.2), as lm-eval has them,
from MATH's training set. Minerva's solutions go on with *Final Answer:*; here the box is the answer.
"""


def with_examples(problem: Problem, shown: Sequence[Example], instruction: str, chat: bool) -> Problem:
    """The problem after worked examples; a `ValueError` if it is one of them.

    Args:
        problem: its only message is the question, with the instruction at its end.
        instruction: what the examples' questions end with in a chat.
        chat: show them as turns; otherwise as one text to continue.
    """
    question = problem.messages[0]["content"].removesuffix(instruction)
    if question.strip() in dict(shown):
        raise ValueError(
            f"the problem {problem.problem_id} is one of the worked examples, which would show its answer; take the "
            "examples from other problems (--shots-source)"
        )
    if chat:
        pairs = [(("user", question + instruction), ("assistant", solution)) for question, solution in shown]
        turns = [{"role": role, "content": content} for pair in pairs for role, content in pair]
        return replace(problem, messages=(*turns, *problem.messages))
    text = "".join(f"Question: {example_question}\nAnswer: {solution}\n\n" for example_question, solution in shown)
    return replace(problem, messages=(), prompt=f"{text}Question: {question}\nAnswer:")
