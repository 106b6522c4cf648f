"""The findings of a report, as text."""

import pytest

from seergate.errors import SeergateError
from seergate.eval.report import load_sweeps, write_report
from seergate.eval.report.findings import cautions, findings, idle, verdict
from seergate.eval.report.plots import conditions
from tests.support.evaluation import edit_samples
from tests.support.made_reports import cells, reconfigure, write_run


def sweep_of(*directories):
    (sweep,) = load_sweeps(*directories)
    return sweep


def test_findings_follow_from_the_numbers(report):
    dense, gate, quest, against, recall = report.findings
    assert dense.startswith("dense answers 90 % of 20 problems right")
    assert gate.startswith("gate at 64 tokens (63 % of the full context) is +0.0 (-14 to +14) points from dense")
    assert "up to 14 points is possible" in gate  # of twenty, all alike: t(21) sqrt(2 / (22 * 21)) = 13.7
    # nine of twenty lost, one more lost and one won: -40.9 ± t(21) sqrt((11 - 22 * .409 ** 2) / 21 / 22) = 26.2
    assert quest == "quest at 64 tokens is -45.0 (-67 to -15) points from dense; no tested budget was enough."
    ahead = (
        "+50.0 (+19 to +72) at 32, +45.0 (+15 to +67) at 64 (ahead, with an interval above zero, at 2 of 2 budgets)"
    )
    assert ahead in against
    assert recall == "recall of dense attention's mass at 32 tokens: gate 60 %, quest 35 %."


def test_what_may_be_chance_is_not_called_a_loss(tmp_path):
    """Two of twenty lost, one more lost and one won: -9.1 ± t(21) sqrt((4 - 22 * .0909 ** 2) / 21 / 22) = 18.9."""
    write_run(tmp_path, "dense", None, lambda i: True)
    write_run(tmp_path, "gate", 64, lambda i: i < 18)
    write_run(tmp_path, "quest", 64, lambda i: i < 2)
    sweep = sweep_of(tmp_path)
    sentence = "gate at 64 tokens is -10.0 (-28 to +10) points from dense; too few problems to tell if that is a loss."
    assert findings(sweep)[1] == sentence
    assert verdict(sweep).endswith("No tested budget was enough for quest. Too few problems to tell for gate.")


def test_thresholds_and_shares_are_compared_with_dense_and_drawn_against_bytes(tmp_path):
    """Each with its rule in its name; the recall of thresholds is told, too."""
    write_run(tmp_path, "dense", None, lambda i: i < 18)
    rules = {"threshold": 0.01, "budget_share": 0.25}
    for option, value in rules.items():
        directory = write_run(tmp_path, "gate", None, lambda i: i < 12, recall=[0.5, 0.7])
        reconfigure(directory.rename(tmp_path / option), method={option: value})
    report = write_report(tmp_path)
    # six of twenty lost, one more lost and one won: -27.3 ± 2.080 * 11.74, of which -2.9 is 27.1 from -30
    names = ["gate, 25 % of the context", "gate, threshold 0.01"]
    assert sorted(report.findings[1:3]) == [
        f"{name} is -30.0 (-52 to -3) points from dense, and reads 100 % of the context." for name in names
    ]
    last = report.findings[-1].removeprefix("recall of dense attention's mass: ").removesuffix(".")
    assert sorted(last.split("; ")) == [f"{name} 60 %" for name in names]
    assert [plot.name for plot in report.plots] == ["bytes.png"]
    assert "differences to dense below 27 points may be chance" in report.markdown.read_text()


def test_few_problems_prove_little(tmp_path):
    """Three problems and one more of each, all alike: t(4) sqrt(2 / 20) = 87.8. Two lost: -40 + t(4) * 40 = 71.1."""
    write_run(tmp_path, "dense", None, lambda i: True, n=3)
    write_run(tmp_path, "gate", 32, lambda i: i < 1, n=3)
    write_run(tmp_path, "gate", 64, lambda i: True, n=3)
    write_run(tmp_path, "quest", 64, lambda i: False, n=3)
    text = write_report(tmp_path).markdown.read_text()
    rows = [row for row in cells(text) if row[0] == "gate"]
    assert [row[3] for row in rows[:2]] == ["-66.7 (-100 to +71)", "+0.0 (-88 to +88)"]
    assert "ahead, with an interval above zero, at 0 of 1 budgets" in text


def test_one_problem_proves_nothing_either_way(tmp_path):
    write_run(tmp_path, "dense", None, lambda i: True, n=1)
    write_run(tmp_path, "gate", 64, lambda i: True, n=1)
    write_run(tmp_path, "quest", 64, lambda i: False, n=1)
    _, gate, quest, *_ = findings(sweep_of(tmp_path))
    assert gate.endswith("no measurable loss, but one of up to 100 points is possible.")
    assert quest.endswith("too few problems to tell if that is a loss.")


def test_a_budget_beyond_the_context_is_all_of_it(tmp_path):
    write_run(tmp_path, "dense", None, lambda i: True)
    write_run(tmp_path, "gate", 4096, lambda i: True)
    assert "gate at 4096 tokens (all of the full context) is" in findings(sweep_of(tmp_path))[1]
    assert "gate 4096 tokens (all)" in verdict(sweep_of(tmp_path))


def test_variants_are_told_apart_in_the_recall(tmp_path):
    for name, layers in (("a", [0]), ("b", [])):
        run = write_run(tmp_path / name, "quest", 64, lambda i: True, recall=[0.5, 0.7])
        reconfigure(run, method={"dense_layers": layers})
    last = findings(sweep_of(tmp_path / "a", tmp_path / "b"))[-1]
    assert last.endswith("at 64 tokens: quest, all sparse 60 %, quest, layers 0 dense 60 %.")


def test_unfinished_runs_are_marked_and_problems_are_a_range(runs):
    edit_samples(runs / "gate-64", lambda rows: rows[:7])
    assert conditions(sweep_of(runs)) == "m on chain_sum, 7 to 20 problems, some runs unfinished"
    text = write_report(runs).markdown.read_text()
    assert text.count("| gate (unfinished) ") == 3, "in each table"
    assert "\ngate (unfinished),64," in (runs / "results.csv").read_text().replace("\r", "")
    assert "with 7 to 20 problems, differences to dense" in text


def test_sections_say_why_they_are_separate(runs):
    for label in ("quest-32", "quest-64"):
        reconfigure(runs / label, task={"grader": "exact", "problems": None})
    report = write_report(runs).markdown.read_text()
    for grader in ("not recorded", "exact"):
        assert f"not all runs have: task.grader {grader}." in report
    for label in ("quest-32", "quest-64"):
        reconfigure(runs / label, task={"name": "needle", "problems": None})
    assert "not all runs have" not in write_report(runs).markdown.read_text(), "the headings name the tasks"


def test_copies_of_the_worked_examples_are_no_difference(runs):
    for label in ("quest-32", "quest-64"):
        reconfigure(runs / label, task={"shots_source": f"{label}.jsonl"})
    assert len(load_sweeps(runs)) == 1


def test_software_that_differs_is_told(runs):
    reconfigure(runs / "quest-64", environment={"torch": "3"})
    assert any("different software: torch 2, 3; differences may" in line for line in cautions(sweep_of(runs)))


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("samples.jsonl", '"correct"', '"corect"', "has a sample without 'correct'"),
        ("config.yaml", "task:", "tusk:", "has no task; it is not from an evaluation"),
        ("config.yaml", "task:", "task: 3\nx:", "has no task; it is not from an evaluation"),
        ("proxies.json", None, "[1]", "does not hold an object"),
    ],
)
def test_damaged_runs_are_told(runs, file, old, new, said):
    path = runs / "gate-32" / file
    path.write_text(path.read_text().replace(old, new) if old else new)
    with pytest.raises(SeergateError, match=said):
        write_report(runs)


@pytest.mark.parametrize(
    ("dense", "gate", "n", "said"), [(380, 380, 400, "level with dense"), (8, 20, 20, "better than dense")]
)
def test_level_with_dense_and_better(tmp_path, dense, gate, n, said):
    write_run(tmp_path, "dense", None, lambda i: i < dense, n=n)
    write_run(tmp_path, "gate", 64, lambda i: i < gate, n=n)
    assert said in findings(sweep_of(tmp_path))[1]


def test_cautions(tmp_path):
    write_run(tmp_path, "gate", 64, lambda i: True)
    edit_samples(write_run(tmp_path, "quest", 64, lambda i: True), lambda rows: rows[:7])
    text = write_report(tmp_path).markdown.read_text()
    for caution in (
        "there is no dense run",
        "quest at 64 is unfinished: 7 samples so far",
        "guessing gets 10 % right",
    ):
        assert caution in text


@pytest.mark.parametrize(("other", "compared"), [("kv4bit", False), ("h2o", True)])
def test_evicting_and_selecting_methods_are_to_be_compared_by_bytes(tmp_path, other, compared):
    """A method that compresses and has no budget is neither."""
    for method, budget in (("dense", None), ("gate", 64), (other, 64 if compared else None)):
        write_run(tmp_path, method, budget, lambda i: True)
    assert any("compare the two by bytes" in line for line in cautions(sweep_of(tmp_path))) == compared


@pytest.mark.parametrize(
    ("problems", "n_problems", "complete"),
    [(None, 20, True), (100, 20, True), (None, 30, False), (20, 20, True), (None, None, False)],
    ids=["all of a file", "more asked for than the file has", "some missing", "as asked", "not known"],
)
def test_a_run_is_whole_when_no_problem_is_missing(tmp_path, problems, n_problems, complete):
    task = {"name": "mine", "file": "mine.jsonl", "problems": problems, "contents": "c", "chance": None}
    write_run(tmp_path, "dense", None, lambda i: True, task=task | ({"n_problems": n_problems} if n_problems else {}))
    assert any("dense is unfinished: 20 samples so far" in c for c in cautions(sweep_of(tmp_path))) == (not complete)


@pytest.mark.parametrize(("right", "chance"), [(0, None), (2, 0.1)])
def test_there_is_no_verdict_where_dense_is_no_better_than_guessing(tmp_path, right, chance):
    for method, budget in (("dense", None), ("gate", 64)):
        directory = write_run(tmp_path, method, budget, lambda i: i < right)
        reconfigure(directory, task={"chance": chance})
    sweep = sweep_of(tmp_path)
    start = f"Dense answers {5 * right} % right, which is not clearly better than guessing: the cost of sparsity"
    assert verdict(sweep).startswith(start)
    text = " ".join([verdict(sweep), *cautions(sweep), *findings(sweep)])
    assert "no measurable loss" not in text.lower() and len(findings(sweep)) == 1
    assert "dense itself is not clearly better than guessing, so differences from it are not meaningful." in text


def test_a_setting_that_does_nothing_is_named(tmp_path):
    write_run(tmp_path, "dense", None, lambda i: True, recall=[1.0, 1.0])
    for budget in (100, 128):
        write_run(tmp_path, "gate", budget, lambda i: True, recall=[1.0, 1.0])
    write_run(tmp_path, "gate", 64, lambda i: True, recall=[0.5, 0.6])
    write_run(tmp_path, "quest", 64, lambda i: True, recall=[1.0, 1.0])
    whole = "gate at 100, gate at 128 read the whole context at every step, which does not measure sparsity."
    same = "quest at 64 reproduced dense attention's logits bit for bit: their options have no effect."
    edit_samples(write_run(tmp_path, "h2o", 64, bool), lambda rows: [row | {"n_tokens": 1} for row in rows])
    first = "h2o at 64 gave answers of one token, which the dense prompt decides: nothing was decoded."
    assert idle(sweep_of(tmp_path)) == [whole, same, first] and whole in cautions(sweep_of(tmp_path))


def test_other_answers_are_an_effect(tmp_path):
    for method, budget in (("dense", None), ("gate", 64)):
        samples = {"reply_logprob": -1.0, "completion": method}
        run = write_run(tmp_path, method, budget, lambda i: True)
        edit_samples(run, lambda rows, samples=samples: [row | samples for row in rows])
    assert idle(sweep_of(tmp_path)) == [], "replies of one token have the log-probability of the dense prompt"


def test_answers_in_which_nothing_was_found_are_told_of(tmp_path):
    write_run(tmp_path, "dense", None, lambda i: True)
    edit_samples(write_run(tmp_path, "gate", 64, bool), lambda rows: [row | {"pred": None} for row in rows])
    assert "no result was found in many answers: gate at 64 (100 %)." in " ".join(cautions(sweep_of(tmp_path)))
