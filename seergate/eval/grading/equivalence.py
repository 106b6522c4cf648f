"""The program of a grading process, which reads pairs of answers as JSON lines and writes a verdict for each.

`seergate.eval.grading.judge` starts it as a script, so that it imports math-verify but nothing of seergate. Its
argument is the processor time in seconds that a comparison may take.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

MEMORY = 4 << 30
"""Maximum address space of a comparison in bytes. Without a limit, a power tower would fill any memory."""

OUT_OF_MEMORY = 77
"""Exit status if memory ran out so completely that no verdict could be given."""


def compare(gold: str, answer: str) -> tuple[bool, str]:
    """Test two answers for mathematical equivalence with math-verify; return the verdict and its reason."""
    from latex2sympy2_extended import NormalizationConfig
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from math_verify import LatexExtractionConfig, grader, parse, parser, verify

    # By default the two letters of R / r would be one, and those of i/2 and 0.5i two, as one would be complex.
    config = ConversionConfig(lowercase_symbols=False)
    parser.latex2sympy = lambda text, is_real, **how: latex2sympy(text, is_real=True, conversion_config=config, **how)

    # Parse as LaTeX only: math-verify's other parser takes any number from plain text. Its units are off, as they
    # would remove a last letter such as h (`grading.mathematics` removes units). Time is limited outside.
    normalization = NormalizationConfig(units=False, malformed_operators=True, nits=True)
    configs = [
        LatexExtractionConfig(
            boxed_match_priority=0, try_extract_without_anchor=False, normalization_config=normalization
        )
    ]
    parsed_gold, parsed_answer = (
        parse(f"\\boxed{{{text}}}", extraction_config=configs, parsing_timeout=None) for text in (gold, answer)
    )
    if not parsed_gold or not parsed_answer:
        return False, f"the {'answer' if parsed_gold else 'gold answer'} could not be parsed"
    if _unsolved(parsed_gold[0], parsed_answer[0]):
        return False, "an equation that is not solved"
    if _untrue(parsed_answer[0]):
        return False, "an equation that does not hold"
    # math-verify calls this for every two expressions, also inside sets, matrices, intervals and equations. Its own
    # function sets differences below 1e-16 to zero, whatever the size of the two numbers.
    grader.sympy_numeric_eq = _equal
    # The order matters: gold first. An interval may be answered as an inequality.
    correct = verify(parsed_gold, parsed_answer, timeout_seconds=None, allow_set_relation_comp=True)
    return bool(correct), "compared by math-verify"


def _equal(gold: Any, answer: Any, rounding: int = 6, precision: int = 15) -> bool:
    """Test two expressions for equality: exactly, or rounded to ``rounding`` decimals if one of them is a decimal.

    Leading zeros are no decimals: 1.23e-30 is rounded to 36. Matrices are compared by element.
    """
    from sympy import Float, I, Rational, UnevaluatedExpr

    if gold.is_Matrix and answer.is_Matrix:
        gold, answer = gold.doit(), answer.doit()
        return gold.shape == answer.shape and all(map(_equal, gold.flat(), answer.flat()))
    gold, answer = (each.xreplace({x: I for x in each.free_symbols if x.name == "i"}) for each in (gold, answer))
    rounded = gold.has(Float) or answer.has(Float)
    # A percent sign may be missing in one of the two. Floats come from decimals, which are exact.
    percent = {UnevaluatedExpr(Rational(1, 100)): Rational(1)}
    for pair in (gold, answer), tuple(x.xreplace(percent) if x.is_Mul else x for x in (gold, answer)):
        a, b = (side.xreplace({x: Rational(str(x)) for x in side.atoms(Float)}).doit() for side in pair)
        if a == b or _is_zero(a - b):
            return True
        if rounded and a.is_number and b.is_number:
            digits = rounding + max(map(_leading_zeros, (a, b)))
            if not a.round(digits) - b.round(digits):  # 5 and 5.0 are unequal
                return True
    return False


def _is_zero(difference: Any) -> bool:
    """True if an expression without decimals is zero, to the 100 digits that sympy's ``evalf`` tries."""
    if not difference.is_number:
        return bool(difference.evalf(100, chop=True) == 0)
    # evalf gives a result of precision 1 if no digit of it is certain.
    return all(not part or part._prec == 1 for part in difference.evalf().as_real_imag())


def _untrue(answer: Any) -> bool:
    """True if an answer equates two different numbers (``205 = 204``), of which math-verify would take the last."""
    from sympy import And, Eq, Float, UnevaluatedExpr

    for relation in answer.args if isinstance(answer, And) else [answer]:
        if isinstance(relation, Eq) and relation.lhs.is_number and relation.rhs.is_number:
            left, right = (side.xreplace({x: x.doit() for x in side.atoms(UnevaluatedExpr)}) for side in relation.args)
            rounded, apart = relation.has(Float), abs(left - right)  # 1/3 = 0.333; a percent is unevaluated
            if apart.evalf() > 2e-3 * abs(right) if rounded else not _is_zero(apart):
                return True
    return False


def _leading_zeros(number: Any) -> int:
    """Zeros between the decimal point and the first other digit; rounding must keep the digits after them."""
    from sympy import floor, log

    return 0 if _is_zero(number) else max(0, -int(floor(log(abs(number), 10).evalf())) - 1)


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
