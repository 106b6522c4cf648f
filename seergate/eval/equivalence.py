"""The program of a grading process, which reads pairs of answers as JSON lines and writes a verdict for each.

`seergate.eval.judge` starts it as a script, so that it imports math-verify but nothing of seergate. Its argument is
the processor time in seconds that a comparison may take.
"""

from __future__ import annotations

import json
import math
import signal
import sys
from typing import Any

MEMORY = 4 << 30
"""Maximum address space of a comparison in bytes. Without a limit, a power tower would fill any memory."""

OUT_OF_MEMORY = 77
"""Exit status if memory ran out so completely that no verdict could be given."""


def compare(gold: str, answer: str) -> tuple[bool, str]:
    """Test two answers for mathematical equivalence with math-verify; return the verdict and its reason."""
    from math_verify import LatexExtractionConfig, parse, verify

    # Parse as LaTeX only: math-verify's other parser takes any number from plain text. Time is limited outside.
    configs = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
    wanted, found = (
        parse(f"\\boxed{{{text}}}", extraction_config=configs, parsing_timeout=None) for text in (gold, answer)
    )
    if not wanted or not found:
        return False, f"the {'answer' if wanted else 'gold answer'} could not be parsed"
    if _unsolved(wanted[0], found[0]):
        return False, "an equation that is not solved"
    if _untrue(found[0]):
        return False, "an equation that does not hold"
    # The order matters: gold first. An interval may be answered as an inequality.
    digits = 6 + _leading_zeros(wanted[0])
    correct = verify(wanted, found, float_rounding=digits, timeout_seconds=None, allow_set_relation_comp=True)
    return bool(correct), "compared by math-verify"


def _untrue(answer: Any) -> bool:
    """True if an answer equates two different numbers (``205 = 204``), of which math-verify would take the last."""
    from sympy import And, Eq, Float

    for relation in answer.args if isinstance(answer, And) else [answer]:
        if isinstance(relation, Eq) and relation.lhs.is_number and relation.rhs.is_number:
            apart = abs(complex(relation.lhs) - complex(relation.rhs))
            rounded = relation.has(Float)  # 1/3 = 0.333
            if apart > (2e-3 if rounded else 1e-9) * abs(complex(relation.rhs)):
                return True
    return False


def _leading_zeros(gold: Any) -> int:
    """Zeros between the decimal point and the first other digit; rounding must keep the digits after them."""
    from sympy import Float

    value = abs(float(gold)) if isinstance(gold, Float) else 1.0
    return max(0, -math.floor(math.log10(value)) - 1) if value else 0


def _unsolved(gold: Any, answer: Any) -> bool:
    """True if an answer is an unsolved equation (``x^2 = 2``), of which math-verify would compare the right side."""
    from math_verify.grader import is_assignment_relation, is_equation, is_relation, take_first_relation
    from sympy import Derivative, Function, Number

    if is_relation(gold) or not is_equation(answer):
        return False
    left = take_first_relation(answer).lhs
    if is_assignment_relation(answer) and not left.atoms(Number):  # x = 2, AB = 2
        return False
    return len(left.free_symbols) == 1 and not left.has(Function, Derivative)  # f(x) = 2, sin(x) = 1/2 name a value


def limit_time(seconds: float) -> None:
    """End this process with SIGPROF, even inside C code, after ``seconds`` of processor time; 0 removes the limit."""
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main(seconds: float) -> None:
    """Compare pairs until the input ends; each comparison may take ``seconds`` of processor time."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):  # Windows; or a lower limit is in force already
        pass
    import math_verify  # noqa: F401  (a missing one ends the process here, before the first pair)

    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        gold, answer = json.loads(line)
        limit_time(seconds)
        try:
            verdict = compare(gold, answer)
        except (Exception, RecursionError) as error:  # a grader must judge whatever a model writes
            verdict = False, f"math-verify failed: {type(error).__name__}"
        limit_time(0)
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    try:
        main(float(sys.argv[1]))
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)
