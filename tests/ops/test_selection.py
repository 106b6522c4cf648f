"""Block selection: the worked example, the reference, ties, poisoned scores, and the promises of its docstring."""

import math
from decimal import Decimal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seergate import ops
from seergate.ops import reference
from seergate.ops.selection import BlockBudget
from tests.support.op_inputs import examples

BOTH = pytest.mark.parametrize(
    "select_blocks", [reference.select_blocks, ops.select_blocks], ids=["reference", "torch"]
)


def blocks(selection: ops.Selection) -> list[list[list[int]]]:
    """Plain lists, after checking the form: ascending, -1 on the right, counts right, int32."""
    indices, counts = selection
    assert indices.dtype == counts.dtype == torch.int32
    rows = []
    for row, number in zip(indices.flatten(0, 1).tolist(), counts.flatten().tolist(), strict=True):
        assert row[number:] == [-1] * (len(row) - number)
        assert row[:number] == sorted(set(row[:number]))
        rows.append(row[:number])
    return [rows[i : i + indices.shape[1]] for i in range(0, len(rows), indices.shape[1])]


LOGITS = [0.5, 2.0, -1.0, 1.0, 0.0]
"""Softmax of the four past ones: .1360 .6095 .0303 .2242; block 4 is the current one."""
CHOSEN = [
    ({"token_budget": 2}, [4]), ({"token_budget": 4}, [1, 4]), ({"token_budget": 100}, [0, 1, 2, 3, 4]),
    ({"token_budget": 7}, [1, 3, 4]),  # three whole blocks: the best two and the current one
    ({"token_budget": 6, "sink_blocks": 1}, [0, 1, 4]),
    ({"token_budget": 6, "sink_blocks": 2}, [0, 1, 4]), ({"token_budget": 8, "sink_blocks": 2}, [0, 1, 3, 4]),
    ({"budget_share": 0.2}, [4]), ({"budget_share": 0.4}, [1, 4]), ({"budget_share": 0.41}, [1, 3, 4]),
    ({"budget_share": 0.2, "budget_min": 5}, [1, 4]), ({"budget_share": 0.2, "sink_blocks": 2}, [0, 1, 4]),
    ({"budget_share": 1.0, "budget_max": 7}, [1, 3, 4]), ({"budget_share": 1}, [0, 1, 2, 3, 4]),
    # with the current block in the softmax, 0 would be out at .1256 already
    ({"threshold": 0.13}, [0, 1, 3, 4]), ({"threshold": 0.14}, [1, 3, 4]), ({"threshold": 0.7}, [4]),
    # without block 0 the softmax of the other three is .7054 .0351 .2595
    ({"threshold": 0.7, "sink_blocks": 1}, [0, 1, 4]), ({"threshold": 0.71, "sink_blocks": 1}, [0, 4]),
    ({"top_p": 0.7, "sink_blocks": 1}, [0, 1, 4]), ({"top_p": 0.71, "sink_blocks": 1}, [0, 1, 3, 4]),
    ({"threshold": 0.7, "sink_blocks": 4}, [0, 1, 2, 3, 4]),
    ({"top_p": 0.60}, [1, 4]), ({"top_p": 0.61}, [1, 3, 4]), ({"top_p": 0.83}, [1, 3, 4]),
    ({"top_p": 0.84}, [0, 1, 3, 4]), ({"top_p": 0.999}, [0, 1, 2, 3, 4]),
    ({"top_p": 0.84, "sink_blocks": 3}, [0, 1, 2, 3, 4]),
]  # fmt: skip


@BOTH
@pytest.mark.parametrize(("rule", "expected"), CHOSEN)
def test_worked_example(select_blocks, rule, expected):
    scores = torch.tensor(LOGITS)[None, None]
    for length in (9, 10):  # the current block partial, or just complete
        assert blocks(select_blocks(scores, torch.tensor([length]), block_size=2, **rule)) == [[expected]]


@BOTH
def test_ties_go_to_the_lower_index(select_blocks):
    scores = torch.zeros(1, 1, 600)
    scores[0, 0, 1::2] = -0.0  # equal, too
    length = torch.tensor([600])
    assert blocks(select_blocks(scores, length, block_size=1, token_budget=4)) == [[[0, 1, 2, 599]]]
    picked = blocks(select_blocks(scores, length, block_size=1, top_p=0.01))[0][0]
    assert picked == [*range(len(picked) - 1), 599]
    tenths = torch.zeros(1, 1, 11)  # 0.3 in fp32 is more than three times 0.1
    assert blocks(select_blocks(tenths, torch.tensor([11]), block_size=1, top_p=0.3)) == [[[0, 1, 2, 10]]]
    assert blocks(select_blocks(tenths, torch.tensor([11]), block_size=1, threshold=0.1)) == [[[10]]]
    quarters = torch.zeros(1, 1, 5)
    for rule, expected in (({"top_p": 0.5}, [0, 1, 4]), ({"threshold": 0.25}, [4])):  # strictly greater
        assert blocks(select_blocks(quarters, torch.tensor([5]), block_size=1, **rule)) == [[expected]]


@BOTH
@pytest.mark.parametrize("rule", [{"token_budget": 24}, {"budget_share": 0.3}, {"threshold": 0.2}, {"top_p": 0.8}])
def test_scores_of_current_and_later_blocks_are_ignored(select_blocks, rule):
    scores, lengths = torch.randn(3, 2, 9), torch.tensor([1, 33, 72])
    clean = blocks(select_blocks(scores, lengths, block_size=8, **rule))
    for garbage in (math.nan, math.inf, -math.inf, 1e30):
        dirty = scores.clone()
        for row, length in enumerate(lengths.tolist()):
            dirty[row, :, (length - 1) // 8 :] = garbage
        assert blocks(select_blocks(dirty, lengths, block_size=8, **rule)) == clean


@BOTH
def test_infinite_and_nan_scores_of_past_blocks(select_blocks):
    scores = torch.tensor([math.nan, -math.inf, 0.0, math.inf, 1.0])[None, None]
    length = torch.tensor([5])
    for expected in ([3, 4], [2, 3, 4], [0, 2, 3, 4], [0, 1, 2, 3, 4]):
        assert blocks(select_blocks(scores, length, block_size=1, token_budget=len(expected))) == [[expected]]
    assert blocks(select_blocks(scores, length, block_size=1, threshold=0.5)) == [[[3, 4]]]


RULES = st.one_of(
    st.tuples(st.just("token_budget"), st.integers(1, 60)),
    st.tuples(st.just("budget_share"), st.integers(0, 1000).map(lambda thousandths: thousandths / 1000)),
    st.tuples(st.just("threshold"), st.floats(1e-4, 0.999)),
    st.tuples(st.just("top_p"), st.floats(1e-3, 0.999)),
)


@examples(150)
@given(
    block_size=st.integers(1, 5),
    capacity=st.integers(1, 12),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    sinks=st.integers(0, 3),
    rule=RULES,
    bounds=st.lists(st.integers(1, 60), max_size=2).map(sorted),
    seed=st.integers(0, 10**6),
)
def test_equals_reference(block_size, capacity, dtype, sinks, rule, bounds, seed):
    rng = torch.Generator().manual_seed(seed)
    scores = (torch.randn(3, 2, capacity, generator=rng) * 2).round(decimals=1).to(dtype)  # rounded: many ties
    lengths = torch.randint(1, capacity * block_size + 1, (3,), generator=rng)
    name, value = rule
    if name == "token_budget":
        value = max(value, (1 + sinks) * block_size)
    options = {"block_size": block_size, name: value, "sink_blocks": sinks}
    if name == "budget_share":
        bounds = (max(n, (1 + sinks) * block_size) for n in bounds)
        options |= zip(("budget_min", "budget_max"), bounds, strict=False)
    got, want = ops.select_blocks(scores, lengths, **options), reference.select_blocks(scores, lengths, **options)
    assert blocks(got) == blocks(want)
    current = ((lengths - 1) // block_size).tolist()
    for row, last in zip(blocks(got), current, strict=True):
        for head in row:
            assert head[-1] == last and set(range(min(sinks, last))) <= set(head)
            assert name != "token_budget" or len(head) == min(value // block_size, last + 1)


@pytest.mark.parametrize("rule", [{"token_budget": 64}, {"budget_share": 0.123457}])
def test_int32_lengths(rule):
    """Their dtype changes nothing; the width of a token budget is static, also where a row is short."""
    scores, lengths = torch.randn(2, 2, 50_000), torch.tensor([77, 400_000])
    one, other = (ops.select_blocks(scores, x, block_size=8, **rule) for x in (lengths.int(), lengths))
    assert all(map(torch.equal, one, other))
    if "token_budget" in rule:
        short = ops.select_blocks(scores, torch.tensor([1, 1]), block_size=8, **rule)
        assert short.indices.shape == one.indices.shape == (2, 2, 8)


@pytest.mark.parametrize("share", [1, 1.0, 0.5, 0.1, 0.3, 0.07, 0.95, 1 / 3, 0.000001])
@pytest.mark.parametrize(("least", "most"), [(None, None), (5, None), (None, 40), (7, 30)])
def test_a_share_of_the_blocks(share, least, most):
    """Against loops: the share is decimal, so 0.1 of 30 blocks is 3, not 4 as in binary."""
    size, lengths = 3, [1, 2, 3, 4, 9, 10, 61, 88, 89, 90, 91, 151]
    scores = torch.randn(len(lengths), 2, 60, dtype=torch.float64)
    bounds = {"budget_min": least and least * size + 1, "budget_max": most and most * size + 2}
    selection = ops.select_blocks(scores, torch.tensor(lengths), block_size=size, budget_share=share, **bounds)
    covered = set()
    for row, length in enumerate(lengths):
        used = math.ceil(length / size)
        count = math.ceil(used / 3 - 1e-9) if share == 1 / 3 else math.ceil(used * Decimal(str(share)))
        count = min(used, max(1, least or 1, count), most or used)
        for head, chosen in enumerate(blocks(selection)[row]):
            best = sorted(range(used - 1), key=lambda j, row=row, head=head: -float(scores[row, head, j]))
            assert chosen == sorted([*best[: count - 1], used - 1])
        covered |= {used} if count == used else set()
    budget = BlockBudget.of(size, budget_share=share, **bounds)
    assert [used <= budget.covered for used in range(1, 31)] == [budget.read(used) == used for used in range(1, 31)]
    assert covered == {-(-length // size) for length in lengths if -(-length // size) <= budget.covered}
    assert torch.equal(budget.read(torch.arange(1, 61)), torch.tensor([budget.read(n) for n in range(1, 61)]))
    empty = ops.select_blocks(scores[:0], torch.tensor([], dtype=torch.int64), block_size=size, budget_share=share)
    assert empty.indices.shape[:2] == empty.counts.shape == (0, 2)
