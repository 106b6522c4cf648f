import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from seergate.eval.grading import judge as judge_module
from seergate.eval.grading.graders import GRADERS, check_gold, check_grader, grade, last_boxed
from seergate.eval.grading.judge import GradingPool, _Judge
from tests.support import evaluation as support
from tests.support.running import refused


@pytest.fixture(scope="module")
def judges():
    with GradingPool() as pool:
        yield pool


@pytest.fixture(scope="module")
def hasty_judges():
    with GradingPool(seconds=3) as pool:
        yield pool


def no_algebra(gold, answer):
    raise AssertionError("this grader compares text")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{ 7 }", "7"),
        (r"first \boxed{1}, no: \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a\}b}", r"a\}b"),
        (r"\boxed {5}", "5"),
        (r"\boxed{4} and then \boxed{cut of", "4"),  # a truncated box is none; the one before it counts
        (r"\boxed{", None),
        (r"\boxed", None),
        (r"\boxed 5", None),
        (r"\boxed{\boxed{3}}", "3"),
        ("boxed{3}", None),
        ("", None),
        (r"\boxed{}", ""),
        (r"\boxed{x\\}", r"x\\"),  # an escaped backslash does not escape the brace
        *((text, None) for text in ("\\boxed{" * 3000, "{" * 10**6, "\\boxed{" + "{" * 500_000, "}" * 10**6)),
    ],
)
def test_last_boxed(text, answer):
    assert last_boxed(text) == answer


def graded(grader, completion, gold):
    return grade(grader, completion, gold, no_algebra)


def test_digit_is_exact():
    assert graded("digit", r"7 7 7 </think> \boxed{ 7 }", "7").correct
    for wrong in (r"7", r"\boxed{ 77 }", r"\boxed{ 7 7 }", r"\boxed{7} \boxed{ 1 }", r"\boxed{ a7= }", r"\boxed{07}"):
        assert not graded("digit", wrong, "7").correct
    assert graded("digit", "no box", "7").pred is None


@pytest.mark.parametrize(
    "separator", [r"\,", r"\;", r"\:", r"\ ", "~", " ", "\u2009", "\u202f", r"{,}", r",\!", r" \, "]
)
def test_thousands_however_they_are_separated(judges, separator):
    for number in ("1000", "10080", "1234567"):
        written = f"{int(number):,}".replace(",", separator)
        assert judges.grade("math", f"\\boxed{{{written}}}", number).correct
        assert judges.grade("math", f"\\boxed{{{number}}}", written).correct
        for gold in ("0", number[:-1] + "1", number[0]):
            assert not judges.grade("math", f"\\boxed{{{written}}}", gold).correct


ANSWERS = r"""
    6.63\times10^{-34} == 6.63e-34 != 1.05\times10^{-34} || 0.0    3^{-70} == \frac{1}{3^{70}} != 3^{-71}
    1-2^{-60} == \frac{2^{60}-1}{2^{60}} != 1-2^{-61} || 1
    \begin{pmatrix}10^{-20}\\1\end{pmatrix} != \begin{pmatrix}10^{-21}\\1\end{pmatrix}
    10^{-20}x == x/10^{20} != 10^{-21}x    1.1\times10^{30} == 11\times10^{29} != 1.2\times10^{30}
    3h == h\cdot 3 || 3\text{ h} != 3 || 3m    3 == 3\text{ h} != 3h || 3 h    \pi r^2 h == r^2 h\pi || πr²h != \pi r^2
    5\text{ m} == 5 m || 5 != 5 h || 5 cm
    10 == 10\ \mathrm{cm^{2}} || 10\,\mathrm{m/s^{2}} || 10\text{ m³} || 10\text{ cm$^{2}$} != 11
    10 == {\textbf{10}} || \underline{\textbf{10}} || \textcolor{blue}{\textbf{10}} != {\textbf{11}}
    30^\circ C == 30°C != 31°C
    0.01 == 10^{-2} != 10^{-3}    \frac{1}{x} == x^{-1} != x    \arcsin x == \sin^{-1} x != \sin x
    60 == 60 km/h || 60 cookies || 60 red apples != 60 ab || 60 is wrong || 60 halves || 60 million
    42 apples == 42 || 42\text{ apples} != 42 oranges || 43 apples    6 \text{ and } 8 == 8, 6 || 6 and 8 != 6 || 6, 9
    x<1 \text{ or } x>3 == x<1 \text{ or } x>3 != x<1 \text{ and } x>3
    3\pm\sqrt{2} == 3+\sqrt2 \text{ and } 3-\sqrt2 || 3±√2 != 3+\sqrt2    \frac{7}{4} == 1 3/4 || 1¾ != 1 3/5 || 3/4
    3000000 == 3 million || \$3\text{ million} != 3 || 3 billion    10^5 == 10⁵ != 105
    2\pi == 2\,\pi || \,2\;\pi\, || 2~\pi != 2\,\pi\,3    3\sqrt{2} == 3\,\sqrt{2} || 3~\sqrt{2} != 3\,2
    20\% == 20\,\%    33\frac{1}{3}\% == \frac{100}{3} || \frac13 || 33⅓\,\% != 33 || 33\%    15 == 15\% != 10+5\%
    \frac{1}{4} == \frac14=25\% || 0.25=25\% != \frac14=26\%
    -5 == \text{-5} || \textbf{-5} || \text{x = -5} != \text{5} || \text{+5}    5 != \text{-5} || \text{-}5
    \frac{3}{4} == \text{3/4} || \textbf{0.75}    12000 == \text{12,000} != \text{12}    (-2,3) == \text{(-2, 3)}
    \frac{-1\pm\sqrt{5}}{2} == \frac{-1 \pm\sqrt5}{2} || x=-\frac12\pm\frac{\sqrt5}2
    \frac{-1\pm\sqrt{5}}{2} != \frac{-1+\sqrt5}{2} || \frac{1\pm\sqrt5}{2}
    \frac{\sqrt5-1}{2}, \frac{-1-\sqrt5}{2} == \frac{-1\pm\sqrt{5}}{2} || \left\{\frac{-1\pm\sqrt5}{2}\right\}
    \frac{1\pm\sqrt5}{2}, 3 == 3, \frac{1-\sqrt5}{2}, \frac{1+\sqrt5}{2}
    x=k\pi,k\in\mathbb{Z} == x = k\pi,\ k \in\mathbb{Z}
    \sqrt{3} == \sqrt{3}\% != 3\%    5 == \text{Answer: 5}    \text{Type-2} == \text{Type 2}
    \text{No} == no || \text{NO} != yes || \text{not} || \text{Yes} as all other cases were excluded before; see
    \text{butan-2-ol} == \text{Butan-2-ol} != \text{butan-1-ol}    \text{3-cycle} == 3\text{-cycle} || \text{3 cycle}
    \frac{\pi^3}{32} == \sum_{n=0}^\infty\frac{(-1)^n}{(2n+1)^3}=\frac{\pi^3}{32}
    12 == 12\,^\circ || \$\,12    5 == x\,=\,5 != 5\,,6    6+9i == 6\,+\,9\,i    -5 == -\,5
    1,2 == 1,\,2 != 1
    \left(3,\frac{\pi}{2}\right) == \bigl( 3, \frac{\pi}{2} \bigr) != \bigl( 3, \frac{\pi}{3} \bigr)
    \begin{pmatrix}1&2\\3&4\end{pmatrix} == \left[\begin{array}{cc}1 & 2 \\ 3 & 4\end{array}\right]
    \begin{pmatrix}1&2\\3&4\end{pmatrix} != \left[\begin{array}{cc}1 & 2 \\ 3 & 5\end{array}\right]
    \begin{pmatrix}1/3\\2\end{pmatrix} == \begin{pmatrix}\dfrac{1}{3}\\[4pt] 2\end{pmatrix}
    \begin{pmatrix}1/3\\2\end{pmatrix} == \begin{pmatrix}\frac13 \\* [+0.5\baselineskip] 2\end{pmatrix}
    \begin{pmatrix}1/3\\2\end{pmatrix} != \begin{pmatrix}\frac13 \\[0.5 em] 3\end{pmatrix}    \mathrm{AB} == BA
    77 == €77 || 77 € || £ 77 != €78    €77 == 77 != £77 || \$77 || 77\text{ dollars} || 77\%
    2,3 == 2\,\text{ or }\,3 || 2\ \text{or}\ 3 != 2\,\text{ or }\,4    x\,\text{or}\,y == x \text{ or } y != xy
    (-\infty,2) == (−∞, 2) || x<2 || 2 > x != (∞, 2) || x\le 2 || x>2 || x<3 || x\ne 2    0.5 == \frac{1}{2}
    \frac{1}{2} == \dfrac{2}{4}    25 == 025    204 == 204 != 205 || -204 || \frac{1}{0} || \undefined\macro || {{{1}}}
    \sqrt{18} == 3\sqrt{2}    1+x^2 == x^2+1    x^2=4 == x^2-4=0 || x^2=4    10,\!080 == 10080
    \$32,\!348 == \$32,348    90^\circ == 90
    \$10 == 10\text{ dollars} || 10 || \$10.00 != 10\text{ cents} || 10\text{ apples} || \$11
    90^\circ == 90\text{ degrees} || 90° != 90\text{ rad} || 90\text{ minutes} || 91^{\circ}
    \text{IV} == IV || \mathrm{IV} != VI || \text{VI}    \text{CAB} == CAB != ABC    east == \text{East} != \text{seat}
    \text{A and B} == \text{B and A}    \{-1,3\} == -1 \text{ and } 3 || x=3 or x=-1 != -1 and 4 || -1
    1-\frac1{\mathrm e} == 1-e^{-1} != 1-\mathrm e    2 + 3\mathrm i == 2+3i    5\text{ m} == 5\,\mathrm m
    3\sqrt{2} == 3sqrt(2) || 3*sqrt(2) != sqrt(2) || 3sqrt(3)    y'=2x == 2x || y'=2x    x'=1, y'=2 == 1,2
    f'(x) == f'(x) || f^{\prime}(x) || f^\prime(x) || f′(x) || f’(x) != f(x) || f''(x)    5' == 5\text{ feet} || 5
    y''+y'=0 == y'+y''=0 || y^{\prime\prime} + y^{\prime} = 0 != y''+y=0    x_1 != x_1'    AB' == B'A != A'B || AB
    \text{ellipse} == Ellipse || \text{Ellipse} != circle || \text{no ellipse}    abC == abC != aBc || Abc
    \text{Yes} == yes != no    AB == BA != ab || Ab    abcd != ABCD    \text{Evelyn} == Evelyn
    52_8 == 52_{8} != 52_6    [2,5) != [2,5]
    0 != 5\,0 || 5~0 || 5 0 || 1.5\,000 || 5 000 00 || x^2-1=0 || \varnothing    6 != 1\,2\,3 || 1 2 3 || 2\;3
    5000 != 5\,0000 || 5000, 0    234 != 2*3*4 || *2*3*4*
    3 != \geq 3 || \ge3 || > 3 || < 3 || ≥ 3 || \le 3 || \leqslant 3 || \neq 3 || \not= 3 || $> 3$
    3 != 4 \Rightarrow 3 || 4 \to 3 || {> 3} || \(\neq 3\) || 2\underline{3}
    2 != x^2=2 || \sqrt{x}=2 || 2x=2 || x/2=2 || x-1=2 || 2x=1+1=2
    101 == 101_{10} != 101_2 || 101_{2} || 101_{(2)} || $101_2$    2516_8 != 2516 || 2516_7
    \{1,2,3\} == 3,1,2 || \{3,2,1\} != (3,1,2) || \left(1,2,3\right)
    (1,2) == (x,y)=(1,2) || \left(1, 2\right) != \{1,2\} || \left\{1,2\right\} || \lbrace 1,2\rbrace || (2,1)
    (0,1) == 0<x<1 || 1>x>0 != \{0,1\} || 0\le x<1 || x<1 || 0<x<2    1<x<2 != \{1,2\} || 1\le x<2
    [-2,7] == -2\le x\le 7 || -2 \leqslant x \leqslant 7 != -2<x\le 7 || -2<x<7 || -3\le x\le 7 || x\le 7
    [-2,7] != \{-2,7\}    [3,\infty) == x\ge 3    x>3 == (3,\infty) || 3<x
    113 == 113, || 113\\ || 113; || 113\, || \textcolor{red}{113} || \color{red}113 || \bf{113}
    113 == {\bf 113} || \underline{113} || \boldsymbol{113} || **113** || `113` || \text{Answer: }113
    113 != \textcolor{red}{114} || **114** || –113 || 113;114 || \text{Answer: }114    -5 == –5 || −5
    \emptyset == \varnothing || ∅ != \{0\} || 0    (1,2),(3,4) == \{(1,2),(3,4)\}    \log_2 3 == \log_{2} 3
    (3,100) == (3,\,100)
    5 == \text{Area} = 5 || x \approx 5 || 5\text{ dollars} || 5\text{ miles per hour} || 5\text{ m/s}
    5 == \$5 || \frac{10}{2}=5 || a_{5}=5 || E_1 = 5 || \left|-5\right| || P(5)=5 || 5\text{}    5 == 5\text{ ways}
    \emptyset == \text{no solution} || \text{No real solutions}    \text{no solution} == \varnothing
    6-5i == 6-5\mathrm{i} || -5i+6    4.5\times10^{33} == 4.5e33 || 4.5E+33 || 4.5\cdot 10^{33}
    5\text{ inches}^2 == 5 || 5\text{ square inches} || 5\text{ in}^2 || 5\text{ sq. in.} || 5 in^2
    2xy == 2yx || 2\cdot x\cdot y    \text{June 20} == \text{June } 20    3\pi == 3\pi\text{ cm}
    \pm 5 == 5, -5 || \{5,-5\}    .0000672 == 6.72e-5    y = 2x + 3 == 2x+3 || y=3+2x
    4 == x=4 || f(x)=4 || \sin x=4 || x+y=4 || AB=4 || EF=4 || 2+2=4 || x=2+2=4 || \lim_{x\to 0} f(x)=4
    5,-5 == x=5 \text{ or } x=-5 || -5 \text{ and } 5 || 5 or -5    3,4,5 == 3, 4, \text{ and } 5 || 3, 4 and 5
    5,6 != 5 \text{ or } 7 || 5 \text{ or more}, 6 || 5 or 6 or 7 || 5 \text{ and not } 6 || 5 nor 6
    (5,6) != 5 \text{ or } 6    1,000 != 1 \text{ and } 000    a=3,b=4 != a=4 \text{ or } b=3
    5 != 5 \text{ or } 6 || 5 \text{ and } b=3
    5 != n \equiv 3 \pmod 5 || 5\bmod 7 || 5 \pmod{7} || 5 \text{ (mod } 7) || 5\mid n || \sim 5 || 5 \text{ or more}
    5 != 5 or more || 5 \text{ at most} || at least 5 || \text{at least } 5 || 5+ || 5? || E_{1}=3, E_{2}=5 || a=3;b=5
    5 != a=3 \text{ and } b=5 || a=3\\b=5 || a = 3 \quad b = 5 || 5\text{ or }6 || \text{no solution for } n=5
    5 != \text{not }5 || \text{undefined at } x=5 || n\ne 5 || \neg 5 || x\not=5 || 5\text{ if }x>0 || 5, x>0
    5 != 5 \quad (x>0) || \begin{cases}5&x>0\\6&x<0\end{cases} || 5 for x>0 || 5 \text{ when } n \text{ is even}
    5 != \text{between }4\text{ and }5 || approximately 5 or 6 || 5 \text{ hours } 20 \text{ minutes}
    5 != 5\text{ ft }6\text{ in} || 5\text{ hr }30\text{ min} || 5\text{ million} || 5 million || 5\text{k}
    5 != 5\text{ dozen} || 5\text{ hundred} || 5\text{ times } 10 || 5\text{ squared} || 5\text{ factorial}
    5 != 5\text{i} || 5\text{ j} || 5 \text{ percent of } x || 5x || 5' || 6=5 || x=6=5 || 5\vee 6 || 5\to 6
    5 != 5\cup\{6\} || \pm 5 || 5... || 5,\ldots || 1,2,\dots,5 || f'=5    \frac{2}{3} != \frac13E_1+\frac23E_2
    .0000672 != .0000673    5\text{ inches}^2 != 5\text{ inches}^3 || 5\text{ cm}^2 || 5\text{ inches}
    5\text{ cm} != 5\text{ m} || 5\text{ cm}^2
    \frac{1}{6} == 0.1\overline{6} || .1\bar 6 != 0.16 || 0.\overline{16} || 1.\overline{6}    0.\overline{9} == 1
    1,1,2 == 2,1,1 || x=1, x=1, x=2 || 1, 2, \text{ and } 1 != 1,2 || 1,2,2 || x=1, x=2, x=2 || 1, 2, \text{ and } 2
    30^\circ,30^\circ,120^\circ == 120°, 30°, 30° || 120, 30, 30 != 30, 120, 120    50\%,50\%,20\% == 20, 50, 50
    (1,2),(1,2),(3,4) == (3,4),(1,2),(1,2) != (1,2),(3,4),(3,4)    6,6,1 != 2+3=6, 6, 1
    1,-1 == -1,1 || \pm 1 != 1,-1,1
    \{1,2\} == \{1,1,2\}    \begin{pmatrix}1&1\end{pmatrix} == \begin{bmatrix}1 & 1 \\ \end{bmatrix}
    \frac{R}{r} == R/r != 1 || \frac{r}{R}    2\Delta == 2Δ != 2\delta    5 == ¥5 || ₹ 5 != ¥6    0 != 0.0000001
    \frac{3-i}{2} == 1.5-0.5i || \frac12(3-i) != 1.5+0.5i    5 == |3+4i| || 5.0000001 || 4.9999999 != 5.00001
    x=5, y=\pi r == (5,\pi r) || 5, πr || y=\pi r, x=5 || 5 \text{ and } \pi r != (\pi r,5) || \pi r, 5 || x=\pi r, y=5
    x_1=2, x_2=3 == 3,2 || \{2,3\}    a=1;b=2 == (1,2) != (2,1)    x=1, x=2 == 2,1 || x=2, x=1
    2i == (1+i)^2 || \frac{i}{.5} || \sqrt{-4} != 2 || i^2    -2\sqrt{3}+2i == 4e^{5i\pi/6}
    \{x\mid x>0\} == \{ x \mid x > 0 \} != \{x\mid x>1\}    i=3 != i=4    \pi r != \pir
    \sum_{i=1}^{n} i == \frac{n(n+1)}{2} != \frac{n^2}{2}    x^2+C == x^2+c != x^2+x    x=5 == X=5    2N == 2n
    A == \text{a} || (a)    \begin{pmatrix}A\end{pmatrix} == \begin{array}{cc}a\end{array}    x+X == X+x != 2x || 2X
    O(n) == O(N) != o(n)    October 10 == \text{october 10} != october 11    x+y=0, x-y=0 == y=x, y=-x != y=x, y=2x
    (1,2),(2,1) == x=1,y=2; x=2,y=1    1,1,2 == a=b=1, c=2    a=1, b=1, c=2 != a=1, c=2 || 1,2
    \$10 == 10 != 10\%    20\% == 20\text{ percent} || 0.2 != \$20 || 20\text{ students}    5\text{ cm} != 5\% || 500\%
    90^\circ != 90\%    1:2:3 == 1 : 2 : 3 != 1:6:1 || 1/6    2:3 == 2 : 3 || \frac{2}{3} != 2:3:1    1:05 != 2:10
    6:30\text{ p.m.} == 6:30 p.m. != 2:10\text{ p.m.} || 6:30\text{ a.m.}    \frac{201}{101} == 1 100/101
    \frac{1100}{101} != 1 100/101    A,C,F == \text{A, C, F} || \text{A},\text{C},\text{F} != A,C || \text{A, C}
    \text{A, C} == A, C != A, F    \text{No solution} == No solution != No    \mathbb{R} == \mathbb R != \mathbb N
    \sqrt[3]{4} == \sqrt[3]4 || \sqrt[3] 4 != \sqrt[3]5    \vec{v} == \vec v != \vec u
    \binom{10}{3} == \binom{10}3 || 120
    \cos 20^\circ == \sin 70^\circ || \cos\frac{\pi}{9} || \cos(20^{\circ}) != \cos 20 || \sin 20^\circ
    40\% == 40\% \text{ of the students} || 40 percent chance || 40\text{ percent increase} != 40\text{ students}
    60\%\text{ chance} == 60\% || 60    3:4:5 == (3:4:5) || x:y:z = 3:4:5 || 3 : 4 : 5    \frac{10000}{3} == 10 000/3
    \sin 20^\circ == \sin\left(20^\circ\right) || \sin{20^\circ} || \sin{20}^\circ || \sin(20)^\circ
    \sin(x+30^\circ) == \sin(30^\circ+x)    11:05\text{ a.m.} == 11:05 != 11:06
    \frac{1}{2} == \sin 30^\circ || \sin^2 45^\circ != \sin 30    \sqrt{3} == \tan 60^\circ
"""
"""Gold answer == right || right != wrong || wrong, or of which a part would be left unread; four spaces between."""


@pytest.mark.parametrize("line", [*re.split(r"\n? {4}", ANSWERS.strip()), "5 == 2\u200b+3"])
def test_right_and_wrong_answers(judges, line):
    others, _, wrong = line.partition(" != ")
    gold, _, right = others.partition(" == ")
    assert right or wrong, "a line that says nothing"
    for answer in filter(None, right.split(" || ")):
        verdict = judges.grade("math", f"so \\boxed{{{answer}}}", gold)
        assert verdict.correct, (answer, verdict.reason)
    for answer in ["", *wrong.split(" || ")]:
        assert not judges.grade("math", f"so \\boxed{{{answer}}}", gold).correct, answer


ADVERSARIAL = {
    "a million digits, written": "9" * 1_000_000,
    "many digits": "9" * 1999,
    "a power tower": "9^{9^{9^{9^{9}}}}",
    "a number of a billion digits": "10^{10^{9}}",
    "a large factorial": "(10^9)!",
    "a sum that does not end": r"\sum_{k=1}^{10^{12}} \frac{1}{k^k}",
    "nested braces": "{" * 900 + "1" + "}" * 900,
    "nested fractions": r"\frac{1}{" * 200 + "x" + "}" * 200,
    "nested roots": r"\sqrt{" * 300 + "2" + "}" * 300,
    "a megabyte of LaTeX": r"\frac{a}{b}+" * 90_000,
    "a polynomial to expand": "(a+b+c+d+f+g)^{200}",
    "lone surrogates": "\ud800\udfff",
    "control characters": "\x00\x1b\x07",
    "a newline inside": "1\n2",
    "emoji": "\U0001f600" * 50,
    "bytes that were no UTF-8": b"\xff\xfe\x80".decode("utf-8", "surrogateescape"),
    "replacement characters": b"\xff\xfe\x80".decode("utf-8", "replace"),
    "many words": r"7\text{ cm" + " per cm" * 270 + "}",
    "many text blocks": "7" + r"\text{a}" * 200,
    "many brackets": "(,7" * 660,
    "many letters": "7" + " ab" * 600,
    "many thousands": "1,000" + ",000" * 480,
    "many fractions": r"\frac" * 390,
    "spaces before a unit": "8" + " " * 1900 + r"\text{cm}",
    "Python": "__import__('os').abort()",
}
SHORT = "a power tower", "nested fractions", "lone surrogates", "a megabyte of LaTeX", "many words", "many brackets"


@pytest.mark.parametrize("name", support.mostly_soak(ADVERSARIAL, *SHORT))
def test_no_answer_hangs_or_crashes(hasty_judges, name):
    began = time.process_time()
    assert not hasty_judges.grade("math", f"so \\boxed{{{ADVERSARIAL[name]}}}", "7").correct
    assert time.process_time() - began < 1, "what is read here, in the process that writes"
    assert hasty_judges.grade("math", r"so \boxed{\frac{14}{2}}", "7").correct  # the next one is graded as usual


ENDLESS = r"\boxed{9^{9^{9^{9}}}}"


def test_the_limit_is_processor_time(monkeypatch):
    """A judge that is held up for longer is not stopped."""
    monkeypatch.setattr(judge_module, "WALL", 1000)
    judge = _Judge(seconds=1)
    assert judge.compare("7", "14/2")[0]
    before, ask = judge.process, judge._ask

    def delayed_ask(line, seconds):
        process = psutil.Process(before.pid)
        process.suspend()
        threading.Timer(1.5, process.resume).start()
        return ask(line, seconds)

    judge._ask = delayed_ask
    assert judge.compare("7", "21/3") == (True, "compared by math-verify")
    assert judge.process is before
    judge._ask = ask
    judge._end()
    judge.seconds = 0.5
    stopped = False, "math-verify was stopped: it took more than 0.5 seconds of processor time"
    assert judge.compare("7", "9^{9^{9^{9}}}") == stopped
    judge._end()


def test_a_comparison_that_waits_is_stopped_by_the_clock(monkeypatch):
    monkeypatch.setattr(judge_module, "WALL", 0.01)
    judge = _Judge(seconds=50)
    assert judge.compare("7", "9^{9^{9^{9}}}") == (False, "math-verify was stopped: it took longer than 0.5 seconds")
    judge._end()


def test_a_judge_that_died_while_it_was_idle_is_replaced():
    with GradingPool() as pool:
        assert pool.grade("math", r"\boxed{14/2}", "7").correct
        (judge,) = pool._judges
        before = judge.process
        before.kill()
        before.wait()
        assert pool.grade("math", r"\boxed{14/2}", "7").correct
        assert judge.process.pid != before.pid


def kill_when_busy(judge, number):
    """Have a judge's process killed when it has worked on its answer for a while."""
    ask = judge._ask

    def spent(process):
        return sum(psutil.Process(process.pid).cpu_times()[:2])

    def kill(process, before):
        while spent(process) < before + 0.05:
            time.sleep(0.005)
        process.send_signal(number)

    def watched(line, limit):
        if line is not None:
            judge._ask = ask
            threading.Thread(target=kill, args=(judge.process, spent(judge.process))).start()
        return ask(line, limit)

    judge._ask = watched


def test_a_judge_that_is_killed_gives_no_verdict():
    """The run is stopped, and the answer is left without a grade."""
    with GradingPool(seconds=60) as pool:
        kill_when_busy(pool._judges[0], signal.SIGKILL)
        refused("was killed from outside", pool.grade, "math", ENDLESS, "7")
        assert pool.grade("math", r"\boxed{14/2}", "7").correct


def test_an_answer_that_makes_the_judge_crash_is_wrong():
    """Or the run could never be finished. Nobody else sends this signal."""
    with GradingPool(seconds=60) as pool:
        kill_when_busy(pool._judges[0], signal.SIGSEGV)
        assert "it crashed" in pool.grade("math", ENDLESS, "7").reason


INTERRUPTED = r"""
import os, signal
from seergate.eval.grading.judge import GradingPool

with GradingPool(seconds=60) as pool:
    signal.signal(signal.SIGINT, lambda *_: None)
    assert pool.grade("math", r"\boxed{14/2}", "7").correct
    before = pool._judges[0].process
    os.killpg(0, signal.SIGINT)
    assert pool.grade("math", r"\boxed{14/2}", "7").correct
    assert pool._judges[0].process is before and before.poll() is None, "the judge was interrupted"
print("went on")
"""


def test_an_interrupt_of_the_terminal_does_not_reach_the_judges():
    """Ctrl-C goes to a process group: this one's own, in a session of its own."""
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(command, start_new_session=True, capture_output=True, text=True, timeout=300)
    assert done.stdout == "went on\n", done.stderr


def test_the_reply_to_an_interrupted_question_is_not_taken_for_another(monkeypatch):
    judge = _Judge(seconds=60)
    assert judge.compare("7", "14/2")[0]
    ask = judge._ask

    def interrupted(line, seconds):
        judge.process.stdin.write(line + "\n")
        judge.process.stdin.flush()
        raise KeyboardInterrupt

    judge._ask = interrupted
    with pytest.raises(KeyboardInterrupt):
        judge.compare("7", "7")
    judge._ask = ask
    assert not judge.compare("7", "8")[0]
    judge._end()


def test_many_are_graded_in_their_order():
    items = [("math", rf"\boxed{{\frac{{{2 * i}}}{{2}}}}", str(i % 5)) for i in range(12)]
    with GradingPool(2) as pool:
        assert [g.correct for g in pool.grade_all(items)] == [i == i % 5 for i in range(12)]


CONTAINED = {"答案是北京市": "北京", "番号は77013です": "77013", "수도는 서울입니다": "서울"}
CONTAINED |= {"I don’t": "don't", "a cafe\u0301.": "café", "_Paris_": "Paris"}


@pytest.mark.parametrize(
    ("grader", "completion", "gold", "pred", "correct"),
    [
        *(("exact", r"\boxed{ a  b }", "ab", "a  b", True), ("exact", r"\boxed{AB}", "ab", "AB", False)),
        ("exact", " 77013.", "77013", "77013", True),
        ("exact", " 77013.\nThe special", "77013", "77013", True),
        *(("exact", f" {name}\n", name, name.rstrip("."), True) for name in ("U.S.", "Washington, D.C.")),
        ("exact", " 77013 of them", "77013", "77013 of them", False),
        ("exact", r"1 \boxed{77013}", "77013", "77013", True),
        ("exact", r"77013, so \boxed{1}", "77013", "1", False),
        ("contains", " It is Oslo, I think.", "oslo", "It is Oslo, I think.", True),
        ("contains", "177013 or 770130", "77013", "177013 or 770130", False),
        ("contains", "12345 and\n77013.", "77013\n12345", "12345 and\n77013.", True),
        ("contains", "12345", "77013\n12345", "12345", False),
        ("contains", "77013? </think> 12345", "77013", "12345", False),
        *((grader, "<think>\n77013? Or", "77013", None, False) for grader in ("exact", "contains", "number")),
        *((grader, r"<think>\boxed{7}? Or", "7", None, False) for grader in ("exact", "contains", "number")),
        *((grader, r"<think>\boxed{5}?</think>7", "7", "7", True) for grader in ("exact", "contains", "number")),
        ("number", "</think>It is 77013, as in <think>.", "77013", "77013", True),
        ("number", "</think><think> 77013", "77013", None, False),
        *(
            (grader, f"{begin}{text}", "5", "5" if end else None, bool(end))
            for grader in ("exact", "contains", "number")
            for begin, marks in (
                ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
                ("<|channel>thought\n", "<channel|>"),
                ("[THINK]", "[/THINK]"),
                ("<seed:think>", "</seed:think>"),
            )
            for end, text in ((marks, f"6 or 7?{marks}5"), ("", "5 or"))
        ),
        ("exact", "<|channel|>final<|message|>5", "5", "5", True),
        ("number", "3 apples, so 1,204.50 in all.", "1204.5", "1204.50", True),
        ("number", "it is 3-5", "5", "5", True),
        *(("number", f"12 of {text} z", "1070000", "1070000", True) for text in ("1 070 000", "1\u00a0070\u00a0000")),
        *(("number", text, "5", "5", True) for text in ("Of 300 000 of 1 000, 5", "1 000.5 or 2 005 or 5")),
        ("number", "the years 1990 300", "300", "300", True),
        ("number", "x2 and 7b", "7", None, False),
        ("number", r"\boxed{12 cm}", "12", "12 cm", True),
        *((grader, " \n", "7", None, False) for grader in ("exact", "contains", "number")),
        *(("number", text, "9500", "9500", True) for text in ("$9{,}500$", r"9\,500", "9\u202f500", "9500km")),
        ("number", "９５００個", "9500", "9500", True),
        *(("number", text, "0.5", "1/2", True) for text in ("1/2", r"\frac12", "½")),
        *(("number", text, "1.75", "7/4", True) for text in ("1 3/4", r"1\frac{3}{4}", "1¾")),
        *(("number", text, "3000000", "3000000", True) for text in ("3 million", r"3\times 10^6", "3e6")),
        ("number", "x = −5", "-5", "-5", True),
        *(
            ("number", f"is {text}", "-5", "-5", True)
            for text in ("-5", r"x = - 5", r"$-\,5", "10 - 15 = - 5", "-$ 5")
        ),
        *(
            ("number", text, "5", "5", True)
            for text in ("so 3 - 5", r"x \approx5", r"$3\cdot4\Rightarrow5$", "(2) - 5")
        ),
        *(("number", text, "5", "5", True) for text in ("So:\n\n- 5 eggs", "**Total** - $5", "| Total | - 5 |")),
        *(("number", text, "5", "5", True) for text in ("Answer:  \n- 5", "Total – 5", "3  - 5", "$3$ - $5$")),
        ("number", r"- \frac{1}{2}", "-1/2", "-1/2", True),
        *(("number", rf"={text}", "-.75", "-3/4", True) for text in (r"\frac{-3}{4}", r"-\frac{1.5}{2}")),
        ("number", r"\frac{3,000}{-4,000}", "-0.75", "-3/4", True),
        *(("number", f"-₹{text}", "-1234567", "-1234567", True) for text in ("12,34,567", "1'234'567")),
        ("number", "the bits 110 011", "11", "011", True),
        ("number", "-$.50.", "-0.5", "-.50", True),
        *(("number", text, "2", None, False) for text in ("x²", r"2\pi", r"\frac{x}{2}", "√2", "1/0", r"\frac{2}{0}")),
        *(("contains", text, gold, text, True) for text, gold in CONTAINED.items()),
        ("contains", "Parisian", "Paris", "Parisian", False),
        *(("contains", text, "5", text, False) for text in ("2.5", "it is 5.75.", "5.5", "5,000")),
        *(("contains", text, "500", text, False) for text in ("1,500", "It costs 500,000.")),
        *(("contains", text, "500", text, True) for text in ("1, 500", "500, 1000", "2020,500", "500,423,9")),
        ("contains", "5,000, or", "5", "5,000, or", False),
        *(("contains", text, "5", text, True) for text in ("5.", "$5.00", "5.2.2020", "31.12.5", "1.5 or 5")),
    ],
)
def test_answers_without_a_box(grader, completion, gold, pred, correct):
    verdict = graded(grader, completion, gold)
    assert (verdict.pred, verdict.correct) == (pred, correct)


@pytest.mark.parametrize("grader", GRADERS)
def test_nothing_is_right_where_there_is_no_gold_answer(grader):
    assert not graded(grader, r"\boxed{}", "").correct


def test_gold_answers_that_nothing_can_equal_are_refused():
    impossible = [*(("letter", gold) for gold in ("b", "(B)", "B.", "1", "")), ("math", "2+1 = 3\n#### 3")]
    for grader, gold in [*impossible, ("math", " "), ("digit", ""), ("number", "seven")]:
        refused("the answer .* must", check_gold, grader, gold)
    check_gold("letter", "B")
    check_gold("exact", "")
    for grader in ("number", "contains"):  # there, it may be Markdown
        check_gold(grader, "2+1 = 3\n#### 3")
    refused("known are digit, math, exact, letter", check_grader, "mth")


def test_a_math_verify_that_does_not_start_is_refused_at_once(tmp_path, monkeypatch):
    """Before any answer is made; its parser refuses other versions of antlr4 only when it is imported."""
    (tmp_path / "math_verify.py").write_text("raise ImportError('antlr4')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    judge_module.try_judge.cache_clear()
    refused("the process that grades mathematics did not start", judge_module.try_judge)
    judge_module.try_judge.cache_clear()
