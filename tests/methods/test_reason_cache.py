"""ReasonCache's equations on numbers worked out by hand, its parts against slow ones, and what it refuses."""

import copy
import re
from collections import Counter

import pytest
import torch
from hypothesis import given, strategies

from seergate import methods
from seergate.methods.reason_cache.distance import PercentileThreshold, block_distances
from seergate.methods.reason_cache.evaluator import Evaluator
from seergate.methods.reason_cache.steps import ReasoningStep, Segmenter, adaptive_threshold, similarity
from seergate.methods.reason_cache.structure import OPERAND, PLAIN, formal_content
from tests.support.running import invalid, refused


def test_similarity_by_hand():
    """Counts {a: 2, b: 1} and {a: 1, b: 2}: cosine .8; texts of 10 and 8 characters: .64; mean .5: threshold .8."""
    one, other = ReasoningStep(0, [7, 7, 9], "x" * 10), ReasoningStep(3, [7, 9, 9], "x" * 8)
    assert similarity(one, ReasoningStep(3, [7, 9, 9], "x" * 10)) == pytest.approx(0.8)
    assert similarity(one, other) == similarity(other, one) == pytest.approx(0.64)
    assert adaptive_threshold([0.3, 0.7], 0.9, 0.7) == pytest.approx(0.8)
    assert adaptive_threshold([], 0.9, 0.7) == 0.9
    assert similarity(one, one) == pytest.approx(1.0)
    assert similarity(one, ReasoningStep(3, [1, 2], "x" * 10)) == similarity(one, ReasoningStep(3, [], "")) == 0


PIECES = ["\n", "\n\n", ".\n\n", " ", "a", "b ", "```", "c\n"]


def decode(ids):
    return "".join(PIECES[i] for i in ids)


def test_steps_end_on_blank_lines():
    cut = Segmenter(decode, start=2)
    ended = cut.feed([4, 5, 1, 0, 0, 4, 0, 3, 0, 2, 4])
    expected = [(2, 5, "ab \n\n"), (5, 11, "\n\na\n \n"), (11, 12, ".\n\n")]
    assert [(step.start, step.end, step.text) for step in ended] == expected, "blank lines in a row are one border"
    assert cut.feed([4, 2])[0].text == "aa.\n\n"
    cut = Segmenter(decode)
    assert cut.feed([0, 0, 1, 3, 0]) == [], "white space alone is no step"
    assert [step.text for step in cut.feed([4, 1])] == ["\n\n\n\n \na\n\n"]
    steps = Segmenter(decode).feed([6, 4, 1, 4, 1, 4, 6, 1, 4, 1])
    assert [step.in_code for step in steps] == [False, True, True, False], "code goes on over blank lines"


def length(cut):
    return cut._begin + len(cut._open)


@given(strategies.lists(strategies.integers(0, 7), max_size=60), strategies.lists(strategies.integers(0, 60)))
def test_cropping_then_going_on_is_never_having_gone_astray(ids, cuts):
    cut, at = Segmenter(decode), 0
    for border in cuts:
        if at < len(ids):
            cut.feed(ids[at : at + border])
            at = min(len(ids), at + border)
            at = min(at, border)
            cut.crop(at)
            assert length(cut) == at
    cut.feed(ids[at:])
    straight = Segmenter(decode)
    straight.feed(ids)
    assert cut.steps == straight.steps and length(cut) == length(straight) == len(ids)
    assert cut.copy().feed([4, 1]) == straight.feed([4, 1])


def test_whole_blocks_of_a_step():
    for start, tokens, blocks in ((3, 10, [1, 2]), (4, 8, [1, 2]), (5, 6, [])):
        assert list(ReasoningStep(start, [0] * tokens, "").whole_blocks(4)) == blocks


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("so $2x+5=10$ holds", "then $2x+5=10$", True),
        ("so $2x+5=10$", "so $2x-5=10$", False),
        (r"\(\frac{a}{b}\)", r"\( \frac{a}{b} \)", True),
        (r"\(\frac{a}{b}\)", r"\(\frac{b}{a}\)", False),
        (r"\[x^2\] ends", r"\[x^2\] begins", True),
        (r"\begin{aligned}a&=b\end{aligned}", r"\begin{aligned}a&=c\end{aligned}", False),
        ("2x + 5 = 10", "2x - 5 = 10", False),
        ("2x + 5 = 10", "2x+5=10", True),
        ("```python\nx = 1  # one\n```", "```python\nx  =  1\n```", True),
        ("```python\nx = 1\n```", "```python\nx = 2\n```", False),
        ("```c\nint x;\n```", "```c\nint   x;\n```", True),
        ("```c\nint x;\n```", "```c\nint y;\n```", False),
        ("50% of $x$", "51% of $x$", True),
        ("only words", "other words, self-made", True),
        ("only words", "words and $x$", False),
        ("$unclosed {x", "$unclosed {y", True),
        (r"\[a \\[2pt] b\]", r"\[a \\[2pt] c\]", False),
        (r"\(a \(b\)", r"\(a \(b\)", True),
        (r"\(a \(b\)", r"\(a \(c\)", False),
    ],
)
def test_structure(one, other, same):
    assert (formal_content(one) == formal_content(other)) is same


@given(strategies.text("a.(\\7 \t+=\n,", max_size=30))
def test_plain_formulas_are_those_of_a_search_from_everywhere(text):
    """The pattern without its look-behind tries every character of an operand as the first of a formula."""
    everywhere = re.compile(PLAIN.pattern.removeprefix(f"(?<!{OPERAND})"))
    assert everywhere.pattern.startswith("(?:")
    assert [m.span() for m in PLAIN.finditer(text)] == [m.span() for m in everywhere.finditer(text)]


@pytest.mark.parametrize(
    "text",
    ["9" * 10**6, "a" * 10**6 + " " * 10**6, "(" * 10**6 + "=", r"\[" * 10**6, r"\(" * 10**6, r"\begin{a}" * 10**5],
    ids=lambda text: text[:9],
)
def test_long_runs_are_read_once(text):
    """A search whose time grew with the square of the length would take hours for these."""
    assert formal_content(text) is None


def test_distance_by_hand():
    """One layer, 2 tokens, 1 head; |dK| = 1 and |dV| = 2: 3 / 4."""
    keys, values = torch.zeros(2, 1, 2, 3), torch.zeros(2, 1, 2, 3)
    keys[1, 0, 1, 2], values[1, 0, 0] = 1.0, torch.tensor([2.0, 0.0, 0.0])
    assert block_distances([(keys, values)], [(0, 1)]) == pytest.approx([0.75])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_distances_are_the_direct_ones(dtype):
    layers = [(torch.randn(9, 3, 5, 7).to(dtype), torch.randn(9, 3, 5, 4).to(dtype)) for _ in range(4)]
    for keys, values in layers:
        keys[7], values[7] = keys[2], values[2]
        keys[8], values[8] = keys[2] * (1 + 1e-4), values[2]
    pairs = [(0, 1), (2, 7), (2, 8), (7, 7), (3, 0), (4, 5)]
    distances = block_distances(layers, pairs)
    for (a, b), distance in zip(pairs, distances, strict=True):
        gaps = [(x[a].double() - x[b].double()).square().sum().sqrt().item() for layer in layers for x in layer]
        assert distance == pytest.approx(sum(gaps) / (4 * 2 * 5 * 3), rel=1e-6, abs=1e-9)
    assert distances[1] == distances[3] == 0, "identical blocks are at distance 0, exactly"
    assert block_distances(layers, []) == []


def test_percentile_threshold():
    """Collects four, then admits what is at most the 80th percentile of all so far, its own included."""
    threshold = PercentileThreshold(80, warm_up=4)
    assert threshold.admit([1.0, 2.0, 3.0, 4.0]) == [False] * 4
    assert threshold.admit([5.0]) == [False], "5 is above 4.2"
    assert threshold.admit([4.0, 9.0]) == [True, False]
    assert PercentileThreshold(0, 0).admit([0.0, 1.0]) == [False, False]
    assert PercentileThreshold(100, 0).admit([0.0, 1.0]) == [True, True]
    same = PercentileThreshold(1, 2)
    assert same.admit([0.0] * 2) == [False] * 2 and same.admit([0.0] * 3) == [True] * 3, "identical blocks share"


class Row:
    """A row of a cache of one layer: blocks of 2 tokens whose keys are the token ids; ``pairs`` are those shared."""

    def __init__(self, run, ids, prompt=()):
        self.run, self.reasoning, self.length, self.pairs = run, None, 0, []
        keys = torch.tensor([*prompt, *ids], dtype=torch.float32)
        self.layers = [(keys[: len(keys) // 2 * 2].view(-1, 1, 2, 1),) * 2]
        self.table = list(range(len(keys) // 2))
        if prompt:
            self.read(prompt)
        for token in ids:
            self.read([token])

    def read(self, tokens):
        """One forward pass, and what the cache does before the next."""
        self.reasoning = self.run.tokens_came(self.reasoning, self.length, list(tokens))
        self.length += len(tokens)
        self.share()

    def crop(self, length):
        self.reasoning.crop(length)
        self.length, self.table[length // 2 :] = length, range(length // 2, len(self.table))

    def share(self):
        if not self.reasoning.unexamined:
            return
        for newer, older in self.run.to_share(self.reasoning, self.table[: self.length // 2], self.layers):
            self.table[newer] = self.table[older]
            self.pairs.append((newer, older))


WORDS = [*"abcdefgh", "\n\n", "$x+1=2$", "$x-1=2$"]
STEP, OTHER = [0, 1, 2, 3, 4, 8], [5, 6, 7, 5, 6, 8]


def evaluator(kind=methods.ReasonCache, **options):
    method = kind(warm_up=0, percentile=100, **options)
    return Evaluator(method, lambda ids: "".join(WORDS[i] for i in ids))


def test_the_evaluator_pairs_whole_blocks_of_similar_steps():
    run = evaluator()
    assert Row(run, [*STEP, *OTHER, *STEP], [0, 0]).pairs == [(7, 1), (8, 2), (9, 3)]
    assert run.counts == Counter(steps=3, similar_steps=1, same_structure=1, measured_blocks=3)


def test_forks_and_crops():
    run = evaluator(include_prompt=True)
    row = Row(run, [*STEP, *OTHER])
    fork = copy.copy(row)
    fork.reasoning, fork.pairs, fork.table = row.reasoning.copy(), [], [*row.table, 6, 7, 8]
    keys = torch.cat((row.layers[0][0], torch.tensor(STEP, dtype=torch.float32).view(-1, 1, 2, 1)))
    fork.layers = [(keys, keys)]
    row.crop(7)
    for token in STEP:
        fork.read([token])
    assert fork.pairs == [(6, 0), (7, 1), (8, 2)] and not row.pairs
    assert len(fork.reasoning.threshold.seen) == 3 and not row.reasoning.threshold.seen, "each has its own distances"
    for token in OTHER[1:]:
        row.read([token])
    assert not row.pairs and run.counts["steps"] == 4, "a step that is taken back and written again counts again"


def test_steps_of_one_pass_are_compared_as_if_they_came_token_by_token():
    """The third step with the blocks that the second one has been given, not with those it had."""
    rows, ids = [], [*STEP, *STEP[:4], 5, 8, *STEP[:4], 5, 8]
    for at_once in (False, True):
        row = Row(evaluator(), ids if not at_once else [], [0, 0])
        if at_once:
            row.layers, row.table = rows[0].layers, list(range(len(ids) // 2 + 1))
            row.read(ids)
        rows.append(row)
    assert rows[0].pairs == rows[1].pairs and rows[0].table == rows[1].table and len(rows[0].pairs) == 6
    assert rows[0].reasoning.threshold.seen == rows[1].reasoning.threshold.seen


def test_formal_content_must_not_differ():
    """Of what the text is now: a step that is cropped and written again is compared anew."""
    for last, expected in ((9, 3), (10, 0)):
        run = evaluator(soft=0.5, strict=0.6)
        row = Row(run, [1, 2, 9, 3, 4, 8, 1, 2, last, 3, 4, 8], [0, 0])
        assert len(row.pairs) == expected
        if expected:
            row.pairs.clear()
            row.crop(10)  # inside the second step, before its formula
            for token in [10, 3, 4, 8]:
                row.read([token])
            assert not row.pairs


def test_the_control_shares_as_much_and_anything():
    ids = [*STEP, *OTHER, *STEP, *OTHER, *STEP]
    kinds = methods.ReasonCache, methods.RandomSharing
    informed, drawn = (Row(evaluator(kind), ids, [0, 0]).pairs for kind in kinds)
    assert 6 <= len(informed) <= 9 and len(drawn) >= len(informed) - 2 and informed != drawn
    assert all(newer > older and newer >= 1 for newer, older in drawn)
    assert len({newer for newer, _ in drawn}) == len(drawn), "each of them gives a block back"
    for include in (False, True):  # behind a prompt of 20 blocks and a half: block 21 is the first of the reasoning
        drawn = []
        for seed in range(5):
            run = evaluator(methods.RandomSharing, seed=seed, include_prompt=include)
            drawn += [older for _, older in Row(run, ids, [7] * 41).pairs]
        assert len(drawn) > 10 and any(older < 21 for older in drawn) == include


def test_refusals(monkeypatch):
    for options, message in (
        ({"strict": 1.5}, "strict is 1.5; it must be in 0..1"),
        ({"soft": 0.95}, "soft is 0.95; it must be in 0..0.9"),
        ({"percentile": 101}, "percentile is 101; it must be in 0..100"),
        ({"border": "("}, "border is '\\(', which is no regular expression"),
        ({"border": "x*"}, "which matches empty text"),
        ({"border": r"\b|x"}, "which matches empty text"),
        ({"reads": methods.TOVA()}, "cannot be read with 'tova'"),
    ):
        invalid(message, methods.ReasonCache, **options)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(r'needs pylatexenc; run: pip install "seergate\[reason\]"', methods.ReasonCache)
    assert methods.ReasonCache(structural_check=False).percentile == 80
