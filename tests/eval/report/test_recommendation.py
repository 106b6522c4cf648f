"""The three sentences of `seergate tune`, on made figures."""

import pytest

from seergate.eval.report import load_sweeps
from seergate.eval.report.recommendation import recommendation
from tests.support.evaluation import edit_samples
from tests.support.made_reports import write_run

N = 20


def needles(root, dense, **right):
    """Of 20 problems, dense attention answers so many right, and the gates at each budget."""
    task = {"name": "needle", "n_problems": N, "chance": None, "contents": "c"}
    write_run(root / "needle", "dense", None, lambda i: i < dense, task=task)
    for budget, count in right.items():
        write_run(root / "needle", "gate", int(budget[1:]), lambda i, count=count: i < count, task=task)
    (sweep,) = load_sweeps(root / "needle")
    return sweep


def texts(root, *, n=N, **more):
    """The gates lose so many nats per token at each budget, a little more on every other text."""
    task = {"name": "perplexity", "length": 3072, "n_problems": n, "contents": "t"}
    for budget, loss in {"b0": 0.0, **more}.items():
        budget = int(budget[1:]) or None
        directory = write_run(root / "texts", "gate" if budget else "dense", budget, bool, n=n, task=task)
        score = {"kl": [loss, loss], "dense_loss": 2.0, "agreement": 1.0}
        lost = [score | {"loss": 2 + loss + 0.01 * (-1) ** i} for i in range(n)]
        edit_samples(directory, lambda rows, lost=lost: [row | more for row, more in zip(rows, lost, strict=True)])
    (sweep,) = load_sweeps(root / "texts")
    return sweep


def sentences_of(root, answers, scored):
    sentences = recommendation(needles(root, **answers), texts(root, **scored))
    assert len(sentences) == 3 and all(each.endswith(".") for each in sentences)
    return sentences


def test_no_loss_at_any_budget(tmp_path):
    first, second, third = sentences_of(tmp_path, {"dense": 18, "b32": 18, "b64": 18}, {"b32": 0.001, "b64": 0.0})
    assert first == (
        "Of 20 problems of the task needle, dense attention answers 18 right; the gates 18 at 32 tokens, 18 at 64 "
        "tokens: no measurable loss at any budget, but one of up to 13.7 points is possible."
    )  # t(21) sqrt(2 / (22 * 21)), as in a report
    # the mean of 20 that are 1.1 or -.9 hundredths apart: t(19) * .01026 / sqrt(20) = .0048 on either side
    assert second == (
        "On 20 held-out texts of 3,072 tokens dense attention has a perplexity of 7.39; the gates +0.1 % at 32 tokens "
        "(KL 0.0010 nats per token), +0.0 % at 64 tokens (KL 0.0000 nats per token): no measurable loss at any "
        "budget, but one of up to 0.6 % of perplexity is possible."
    )
    assert third == "So 32 tokens, 32 % of a context of 101, is the smallest budget with no measurable loss."


def test_no_loss_at_some_budgets(tmp_path):
    """The budget is the larger one of the two that answers and texts ask for."""
    right, losses = {"dense": 18, "b32": 2, "b64": 18, "b96": 18}, {"b32": 0.3, "b64": 0.05, "b96": 0.0}
    first, second, third = sentences_of(tmp_path, right, losses)
    assert "2 at 32 tokens" in first and "no measurable loss from 64 tokens on, but" in first
    assert "+35.0 % at 32 tokens" in second and "no measurable loss from 96 tokens on, but" in second
    assert third.startswith("So 96 tokens, 95 % of a context of 101, is the smallest budget with no measurable loss")


def test_a_loss_at_every_budget(tmp_path):
    first, second, third = sentences_of(tmp_path, {"dense": 18, "b32": 2, "b64": 4}, {"b32": 0.3, "b64": 0.1})
    assert first.endswith("4 at 64 tokens: a measurable loss even at 64 tokens.")
    assert second.endswith("a measurable loss even at 64 tokens.")
    assert third == "So no budget up to 64 tokens is clearly without loss: train for longer, or give larger budgets."
    *_, third = sentences_of(tmp_path / "b", {"dense": 18, "b32": 18, "b64": 18}, {"b32": 0.3, "b64": 0.1})
    assert third.startswith("So no budget up to 64 tokens"), "answers alone allow none"


def test_too_few_problems(tmp_path):
    """Two of eighteen lost is no loss that can be told from chance, and not none either."""
    first, _, third = sentences_of(tmp_path, {"dense": 18, "b64": 16}, {"b64": 0.0})
    assert first.endswith("16 at 64 tokens: too few to tell if 64 tokens cause a loss.")
    assert third.startswith("So no budget up to 64 tokens is clearly without loss")


@pytest.mark.parametrize(("loss", "budget"), [(0.0, "So 64 tokens"), (0.1, "So no budget up to 64 tokens")])
def test_dense_attention_at_chance_leaves_the_texts(tmp_path, loss, budget):
    first, _, third = sentences_of(tmp_path, {"dense": 0, "b64": 0}, {"b64": loss})
    none = "Answers cannot measure a budget's loss: dense attention itself answers 0 of 20 problems"
    assert first == f"{none} of the task needle right."
    assert third.startswith(budget) and "by texts alone" in third


def test_one_text_shows_nothing(tmp_path):
    _, second, third = sentences_of(tmp_path, {"dense": 18, "b64": 18}, {"n": 1, "b64": 0.0})
    assert "On 1 held-out text of" in second and second.endswith("but a single one proves nothing.")
    assert third.endswith("no measurable loss, by answers alone.")
    *_, nothing = recommendation(needles(tmp_path / "b", dense=0, b64=0), texts(tmp_path / "b", n=1, b64=0.0))
    assert nothing.startswith("So no budget can be recommended")
