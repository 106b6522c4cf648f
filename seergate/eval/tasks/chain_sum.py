r"""The chain-sum task: arithmetic whose operands must be looked up far back in the text.

A problem defines variables in shuffled order. Three are digits, every other one is the sum of two random earlier ones.
A definition ends with the variable to evaluate next, the last one with ``answer``. The reasoning follows these links:
each step copies a definition from the prompt, recalls the values of both operands from earlier steps, and writes their
sum modulo 10. Every decision of the reasoner is the retrieval of one token:

    prompt       [a9] is the sum of a17 plus a5 , and then comes a20: .
                 [a17] is just the digit 4 , and then comes a5: .
                 [a5] is just the digit 3 , and then comes a9: .
                 [a20] is the sum of a17 plus a9 , and then comes answer .   start with a17:
    reasoning    a17: which gives a17= 4 . so next a5: which gives a5= 3 . so next
                 a9: a17 4 plus a5 3 which gives a9= 7 . so next
                 a20: a17 4 plus a9 7 which gives a20= 1 . so next answer
    answer       \boxed{ 1 }

A variable has a separate token for each role (``[a17]`` in its definition, ``a17`` as an operand, ``a17:`` where it is
to be evaluated, ``a17=`` before its value), so every lookup matches a single token. The prompt names the first
variable, and the last definition says that it is the last: no step depends on a minimum, a count, or the absence of a
token, which sparse attention could not detect.

More than half of the tokens are filler words, as in natural text. Without them, a block of eight tokens would contain
so many names that their pooled keys would mask each other, which does not happen in the text of a large model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from seergate.checks import check

TRAINING_SEEDS = 1_000_000
"""Training problems are drawn with seeds from this number on, evaluation problems with smaller ones."""

NAMES = 80
"""Size of the pool of variable names that a problem draws from."""

ROLES = ("[a{}]", "a{}", "a{}:", "a{}=")
"""The tokens of a variable by role: in its definition, as an operand, to be evaluated, before its value."""

WORDS = (
    *("is", "the", "sum", "of", "plus", "just", "digit", ",", "and", "then", "comes", ".", "start", "with"),
    *("which", "gives", "so", "next"),
)
"""Filler words, which carry no information."""

LAST = "answer"
"""Token in the last variable's definition, in place of the next variable to evaluate."""

GIVENS = 3
"""Number of variables that are given as digits."""


@dataclass(frozen=True)
class Problem:
    """One chain-sum problem.

    Attributes:
        names: variable numbers in evaluation order.
        operands: per variable, the two positions (into ``names``) it sums, or ``None`` if it is given as a digit.
        values: per variable, its value (0..9).
        listing: the order in which the prompt lists the definitions (positions into ``names``).
    """

    names: tuple[int, ...]
    operands: tuple[tuple[int, int] | None, ...]
    values: tuple[int, ...]
    listing: tuple[int, ...]

    @property
    def question(self) -> str:
        """The user's turn."""
        lines = []
        links = [*(f"a{name}:" for name in self.names[1:]), LAST]
        for i in self.listing:
            pair = self.operands[i]
            if pair is None:
                body = f"just the digit {self.values[i]}"
            else:
                body = f"the sum of a{self.names[pair[0]]} plus a{self.names[pair[1]]}"
            lines.append(f"[a{self.names[i]}] is {body} , and then comes {links[i]} .")
        return " ".join([*lines, f"start with a{self.names[0]}:"])

    @property
    def reasoning(self) -> str:
        """The chain of thought, without its tags."""
        steps = []
        for i, name in enumerate(self.names):
            pair = self.operands[i]
            sum_of = "" if pair is None else " plus ".join(f"a{self.names[j]} {self.values[j]}" for j in pair) + " "
            steps.append(f"a{name}: {sum_of}which gives a{name}= {self.values[i]} . so next")
        return " ".join([*steps, LAST])

    @property
    def answer(self) -> str:
        """The gold answer, one digit."""
        return str(self.values[-1])

    @property
    def solution(self) -> str:
        """The assistant's turn: reasoning in think tags, then the boxed answer."""
        return f"<think> {self.reasoning} </think> \\boxed{{ {self.answer} }}"

    @property
    def messages(self) -> list[dict[str, str]]:
        """The whole conversation in chat format."""
        return [{"role": "user", "content": self.question}, {"role": "assistant", "content": self.solution}]


def make_problem(variables: int, rng: random.Random) -> Problem:
    """Draw one problem.

    Args:
        variables: number of variables, ``GIVENS + 1`` .. ``NAMES``. A conversation has about 27 tokens per variable.
        rng: source of randomness; the same state gives the same problem.

    Raises:
        ValueError: if ``variables`` is out of range.
    """
    check("variables", variables, GIVENS < variables <= NAMES, f"in {GIVENS + 1}..{NAMES}")
    names = rng.sample(range(NAMES), variables)
    operands: list[tuple[int, int] | None] = [None] * GIVENS
    values = [rng.randrange(10) for _ in range(GIVENS)]
    for i in range(GIVENS, variables):
        a, b = rng.sample(range(i), 2)
        operands.append((a, b))
        values.append((values[a] + values[b]) % 10)
    listing = list(range(variables))
    rng.shuffle(listing)
    return Problem(names=tuple(names), operands=tuple(operands), values=tuple(values), listing=tuple(listing))


def make_problems(count: int, variables: int | tuple[int, int], seed: int) -> Iterator[Problem]:
    """Draw ``count`` problems; ``variables`` is a number, or a range ``(low, high)`` to draw from uniformly.

    Equal arguments give equal problems on every machine (``random.Random`` is specified to be portable).
    """
    low, high = (variables, variables) if isinstance(variables, int) else variables
    rng = random.Random(f"chain_sum/{seed}")
    for _ in range(count):
        yield make_problem(rng.randint(low, high), rng)


def vocabulary() -> list[str]:
    """All word-level tokens of the task, without the chat markup."""
    words = [str(d) for d in range(10)] + [*WORDS, LAST, "\\boxed{", "}"]
    return words + [role.format(n) for role in ROLES for n in range(NAMES)]
