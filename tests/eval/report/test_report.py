import csv
import html
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from seergate.errors import SeergateError
from seergate.eval.report import load_sweeps, write_report
from seergate.eval.report.findings import cautions
from seergate.eval.report.plots import pareto
from seergate.eval.report.tables import markdown
from tests.support.evaluation import edit_samples
from tests.support.made_reports import cells, reconfigure, write_method, write_run
from tests.support.running import refused


def test_tables_hold_the_numbers(report):
    text = report.markdown.read_text()
    core, proxies, recall = (row for row in cells(text) if row[:2] == ["gate", "32"])
    # 12 of 20 right; six problems of 20 lost, one more lost and one won: -27.3 ± 2.080 * 11.74
    assert core[:4] == ["gate", "32", "60.0 (39 to 78)", "-30.0 (-52 to -3)"]
    assert core[4:] == ["45.0", "0.0", "0.0", "32.0", "5.0", "70.0", "89.9"]
    assert proxies == ["gate", "32", "60.0", "60.0", "0.4000", "2.5000", "90.0", "2.000", "1.500"]
    assert recall == ["gate", "32", "60.0", "50.0", "70.0"]
    assert "layer 2" in text and "99.0" not in text  # of the stale file


def test_html_stands_alone(report):
    page = report.html.read_text()
    assert page.count("data:image/png;base64,") == 3
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert set(re.findall('href="#(.*?)"', page)) == set(re.findall('<h2 id="(.*?)"', page)), "contents"
    assert page.count("<table>") == page.count("</table>") == 3
    assert re.search("<td[^>]*>60.0</td>", page)
    assert page.count("<details>") == page.count("</details>") == page.count("<summary>") > 1
    assert "![" not in page and "\ue000" not in page and "\ue001" not in page


def test_an_answer_is_shown_as_it_is(tmp_path):
    answer = "TABLE OF CONTENTS\n~~~\n</details>\n<details><summary>x</summary>"
    write_run(tmp_path, "dense", None, lambda i: True, completion=answer)
    report = write_report(tmp_path)
    page, text = report.html.read_text(), report.markdown.read_text()
    assert f"\n~~~~\n{answer}\n~~~~\n" in text
    assert f"<pre><code>{html.escape(answer)}\n</code></pre>" in page
    assert page.count("<details>") == page.count("</details>") == page.count("<summary>")


@pytest.mark.parametrize(("lengths", "drawn"), [([120, 160], True), ([120], False)])
def test_accuracy_by_length_is_drawn_for_a_single_depth_too(tmp_path, lengths, drawn):
    task = {"name": "variable_tracking", "n_problems": 20, "contents": "c", "length": lengths, "depths": [0]}
    run = write_run(tmp_path, "dense", None, bool, task=task)
    ids = (f"{length}-0-{i}" for i in range(20) for length in lengths)
    edit_samples(run, lambda rows: [row | {"problem_id": next(ids)} for row in rows])
    assert ("depth.png" in {plot.name for plot in write_report(tmp_path).plots}) == drawn


def test_the_verdict_comes_first(report):
    """Right are 18 of dense, 12 and 18 of the gate, 2 and 9 of Quest."""
    verdict = report.markdown.read_text().splitlines()[2]
    assert verdict.startswith("**Dense answers 90 % right")
    assert verdict.endswith("from these budgets on: gate 64 tokens (63 %). No tested budget was enough for quest.**")


def test_all_figures_are_in_a_file_for_programs(report):
    with (report.markdown.parent / "results.csv").open() as file:
        rows = {(row["method"], row["budget"]): row for row in csv.DictReader(file)}
    assert len(rows) == 5 and rows["dense", ""]["accuracy"] == "0.9"
    gate = rows["gate", "32"]
    assert (gate["accuracy"], gate["n_samples"], gate["bytes_read_per_step"]) == ("0.6", "20", "5000.0")
    assert (float(gate["accuracy_low"]), float(gate["accuracy_high"])) == pytest.approx((0.387, 0.781), abs=1e-3)
    lengths = [gate[f"token_quantiles.{share}"] for share in (0.1, 0.5, 0.9)] + [gate["max_tokens"]]
    assert lengths == ["44", "45", "46", "46"]  # in turn
    assert (gate["block_size"], gate["cached_tokens"], gate["own_bytes_peak"]) == ("16", "150.0", "80000.0")
    assert gate["recall"] == "0.6"
    assert not any("[" in value for value in gate.values()), "recall by layer is in the report"


def test_answers_of_a_problem_that_settings_do_not_agree_on(report):
    answers = report.markdown.read_text().partition("## Sample answers")[2]
    assert ": right, " in answers and ": wrong, " in answers
    assert "<summary>quest at 32: " in answers and "tokens, ended by stop</summary>" in answers


def test_the_pareto_front_holds_what_none_beats(tmp_path):
    for name, size, right in (("dense", 100, 18), ("gate", 100, 12), ("h2o", 40, 10), ("tova", 50, 9), ("rpc", 30, 2)):
        directory = write_run(tmp_path, name, None if name == "dense" else 32, lambda i, right=right: i < right)
        held = {"own_bytes_mean": 1000.0 * size}
        edit_samples(directory, lambda rows, held=held: [row | held for row in rows])
    (sweep,) = load_sweeps(tmp_path)
    for chance, front in ((0.0, ["rpc", "h2o", "dense"]), (0.1, ["h2o", "dense"])):  # guesses do not count
        assert [s.method for s in pareto(sweep.settings, "own_bytes_mean", chance)] == front


def test_names_in_plots_are_no_formulas(tmp_path):
    name = "a$x^{$b\x1b*<script>"
    write_run(tmp_path, "dense", None, lambda i: True, model=name)
    for fingerprint, part in (("13ae", "a"), ("13af", "b")):
        gates = {"path": "g", "fingerprint": fingerprint, "name": f"$\\frac{part}$"}
        write_run(tmp_path / part, "gate", 32, lambda i: True, model=name, gates=gates, recall=[0.5, 0.7])
    report = write_report(tmp_path, None, tmp_path / "a", tmp_path / "b")
    assert "<script" not in report.html.read_text()
    drawn = [plot.with_suffix(".svg").read_text() for plot in report.plots]
    assert all(ElementTree.fromstring(text).tag.endswith("svg") for text in drawn)
    assert any("$x^{$b" in text and "$\\fraca$" in text for text in drawn)
    assert not any(r"\n" in text for text in drawn), "titles have two lines"


def test_other_models_are_not_compared(runs, monkeypatch):
    assert [s.label for s in load_sweeps(runs / "gate-32")[0].settings] == ["gate at 32"]
    monkeypatch.chdir(runs.parent)
    (sweep,) = load_sweeps(Path(runs.name), runs)  # named twice
    assert len(sweep.settings) == 5
    write_run(runs, "oracle", 64, lambda i: True, model="other")
    assert sorted(len(s.settings) for s in load_sweeps(runs)) == [1, 5]
    report = write_report(runs)
    assert {"accuracy-1.png", "accuracy-2.png"} <= {plot.name for plot in report.plots}


def test_nothing_to_report_is_told(tmp_path):
    def check_refusal(message, place=tmp_path):
        refused(message, write_report, place)

    (tmp_path / "config.yaml").write_text("")  # as of a run that failed before its first sample
    check_refusal("holds no runs")
    check_refusal("does not exist", tmp_path / "nowhere")
    write_run(tmp_path / "tasks" / "aime", "dense", None, lambda i: True)
    check_refusal("holds no runs itself; give the directories in it: .*aime$", tmp_path / "tasks")
    config = write_run(tmp_path, "dense", None, lambda i: True) / "config.yaml"
    config.write_text("[")
    check_refusal(r"config\.yaml, line 1, column 2 is not YAML")
    config.unlink()
    check_refusal("not a run directory")


def test_markdown_tables_are_aligned():
    table = markdown(["a", "long"], [["x", "1"], ["yyyy", "22"]])
    assert table.splitlines() == ["| a    | long |", "| ---- | ---: |", "| x    |    1 |", "| yyyy |   22 |"]


def write_sampled_run(root, method, budget, outcomes, **config):
    """As `write_run`, with several samples per problem: ``outcomes[problem]`` are 0 or 1 of each."""
    several = [(problem, i, bool(right)) for problem, each in enumerate(outcomes) for i, right in enumerate(each)]
    directory = write_run(root, method, budget, lambda i: False, n=len(outcomes), **config)
    edit_samples(directory, lambda rows: [rows[n] | {"sample_idx": i, "correct": right} for n, i, right in several])


def test_pass_at_k_and_differences_on_common_samples(tmp_path):
    write_sampled_run(tmp_path, "dense", None, [(1, 1), (0, 1), (0, 0)])
    write_sampled_run(tmp_path, "gate", 64, [(1, 0), (0, 1), (0, 0)])
    (sweep,) = load_sweeps(tmp_path)
    text = write_report(tmp_path).markdown.read_text()
    assert re.search(r"\| dense +\| +– \| +50\.0 \| +66\.7 \|", text)
    assert sweep.difference(sweep.at("gate", 64), sweep.dense).mean == pytest.approx(-1 / 6)
    edit_samples(tmp_path / "gate-64", lambda rows: rows[::2])  # unfinished: the second of each problem is missing
    (sweep,) = load_sweeps(tmp_path)
    assert sweep.difference(sweep.at("gate", 64), sweep.dense).mean == 0  # first samples are alike


def parted(root, *kept):
    """Runs as they are while they are made: dense has answered some problems, the others have answered others."""
    for path in root.glob("*/samples.jsonl"):
        part = slice(10) if path.parent.name in kept else slice(10, None)
        edit_samples(path.parent, lambda rows, part=part: rows[part])


def test_unfinished_runs_without_a_common_problem_are_reported_on(runs):
    write_run(runs, "kv4bit", None, lambda i: i < 18)
    parted(runs, "dense", "quest-64")
    report = write_report(runs)
    text = report.markdown.read_text()
    assert "nan" not in text and not any("nan" in line for line in report.findings)
    assert re.search(r"^\| gate \(unfinished\) +\| +64 \| +80\.0 \([^|]+\| +– \|", text, re.MULTILINE)
    assert any(line.startswith("quest at 64 tokens") for line in report.findings)
    assert not any(line.startswith(("gate at", "kv4bit")) for line in report.findings)
    (gates,) = (line for line in report.findings if line.startswith("gate minus quest"))
    assert " at 32 " in gates and " at 64" not in gates and "of 1 budgets" in gates
    (sweep,) = load_sweeps(runs)
    (errors,) = (line for line in cautions(sweep) if "may be chance" in line)
    assert re.search(r"below \d+ points", errors)
    (runs / "quest-64" / "samples.jsonl").unlink()
    (sweep,) = load_sweeps(runs)
    assert not any("may be chance" in line for line in cautions(sweep))


@pytest.mark.slow
def test_settings_are_compared_with_those_that_were_asked_the_same_way(runs):
    """By what no weight and no problem shows."""
    plain, yarn = {"rope_type": "default"}, {"rope_type": "yarn", "factor": 4.0}
    alike = {"model": {"rope": plain}, "task": {"prompts": "a"}, "generation": {"ends": [1]}}
    for other in (
        {"model": {"rope": yarn}},
        {"task": {"prompts": "b"}},
        {"generation": {"ends": [1, 2]}},
        {"environment": {"math-verify": "2"}},
    ):
        for name in ("dense", "gate-32", "gate-64", "quest-32", "quest-64"):
            reconfigure(runs / name, **alike, environment={"math-verify": "1"})
        reconfigure(runs / "quest-64", **other)
        apart = [{s.directory.name for s in sweep.settings} for sweep in load_sweeps(runs)]
        assert sorted(map(len, apart)) == [1, 4] and {"quest-64"} in apart
        assert "rotary embedding: rope_type default" in write_report(runs).markdown.read_text()


def test_anchors_tell_series_apart(tmp_path):
    for anchors in ([], [0, 2], [0, 1]):
        write_method(tmp_path, "gate", 64, lambda i: i < 9, anchors=anchors)
    (sweep,) = load_sweeps(tmp_path)
    assert sorted(setting.series for setting in sweep.settings) == ["gate", "gate, anchors=0+1", "gate, anchors=0+2"]


def test_runs_from_several_places_are_put_side_by_side(tmp_path):
    write_run(tmp_path / "a", "dense", None, lambda i: i < 18)
    write_run(tmp_path / "b", "gate", 64, lambda i: i < 17)
    report = write_report(tmp_path / "a", tmp_path / "out", tmp_path / "b")
    assert report.html.parent == tmp_path / "out"
    assert "gate at 64 tokens" in report.findings[1]
    fragment = write_run(tmp_path / "d", "dense", None, lambda i: i < 18)
    lines = (fragment / "samples.jsonl").read_text().splitlines(keepends=True)
    (fragment / "samples.jsonl").write_text("".join(lines[: len(lines) // 3]))
    (sweep,) = load_sweeps(fragment, tmp_path / "a", tmp_path / "b")
    assert sweep.dense.directory == tmp_path / "a" / "dense", "the whole run, not the interrupted one"
    write_run(tmp_path / "c", "gate", 64, lambda i: i < 9)
    refused("are runs of the same setting", write_report, tmp_path / "b", tmp_path / "out", tmp_path / "c")
    write_run(tmp_path / "c", "dense", None, lambda i: i < 18)
    with pytest.raises(SeergateError, match="gate-64 are runs of the same setting"):
        write_report(tmp_path / "a", tmp_path / "out", tmp_path / "b", tmp_path / "c")


def test_a_report_replaces_only_reports(tmp_path):
    write_run(tmp_path / "runs", "dense", None, lambda i: i < 18)
    for _ in range(2):
        write_report(tmp_path / "runs", tmp_path)
    for text in ("# My report\n", ""):
        (tmp_path / "report.md").write_text(text)
        refused("report.md is not a report of seergate's", write_report, tmp_path / "runs", tmp_path)
        assert (tmp_path / "report.md").read_text() == text


def test_variants_at_different_budgets_have_series_of_their_own(tmp_path):
    """As `eval --match` makes them. What is calibrated for each budget is one variant."""
    for interval, budgets in ((8, (40, 100)), (16, (36, 92))):
        for budget in budgets:
            write_method(tmp_path, "h2o", budget, lambda i: i < 9, interval=interval)
    for name, budget, window, written in (
        *(("lazy_eviction", 48, 24, "auto"), ("lazy_eviction", 96, 40, "auto")),
        *(("lazy_eviction", 52, 24, "24"), ("lazy_eviction", 100, 24, "24")),
    ):
        run_dir = write_method(tmp_path, name, budget, lambda i: i < 9, window=window)
        run_dir.rename(tmp_path / f"{name}-{budget}-window={written}")
    for budget, read in ((64, 32), (96, 16)):
        run_dir = write_method(tmp_path, "h2o+gate", budget, lambda i: i < 9, **{"gate.token_budget": read})
        run_dir.rename(tmp_path / f"h2o+gate-{budget}-read_budget={read}")
    (sweep,) = load_sweeps(tmp_path)
    series = {"h2o, interval=8", "h2o, interval=16", "lazy_eviction, window=auto", "lazy_eviction, window=24"}
    assert {s.series for s in sweep.settings} == series | {f"h2o+gate, gate.token_budget={n}" for n in (32, 16)}


def test_gates_are_told_apart(tmp_path):
    """Only where two are rivals: each block size has gates of its own anyhow."""
    gates = [{"path": f"gates-{name}", "fingerprint": name * 8} for name in ("13ae", "13af")]
    write_run(tmp_path / "a", "dense", None, lambda i: True)
    write_run(tmp_path / "a", "gate", 64, lambda i: True, gates=gates[0])
    write_run(tmp_path / "a", "gate", 32, lambda i: True, gates=gates[1])
    write_run(tmp_path / "b", "gate", 64, lambda i: False, gates=gates[1])
    report = write_report(tmp_path / "a", None, tmp_path / "b")
    text = report.markdown.read_text()
    (sweep,) = load_sweeps(tmp_path / "a", tmp_path / "b")
    assert [s.label for s in sweep.settings[1:]] == ["gate [13af] at 32", "gate [13ae] at 64", "gate [13af] at 64"]
    assert [line.split(" at ")[0] for line in report.findings[1:3]] == ["gate [13af]", "gate [13ae]"]
    for own in gates:
        assert f"gates: `{own['path']}` (weights {own['fingerprint']})" in text
    reconfigure(tmp_path / "a" / "gate-64", gates={"name": "msa"})
    (sweep,) = load_sweeps(tmp_path / "a", tmp_path / "b")
    assert [s.label for s in sweep.settings[1:]] == ["gate [13af] at 32", "gate [msa] at 64", "gate [13af] at 64"]
    for run in (tmp_path / "a" / "gate-32", tmp_path / "b" / "gate-64"):
        reconfigure(run, gates={"name": "indexer"})
    (sweep,) = load_sweeps(tmp_path / "a", tmp_path / "b")
    labels = ["gate [indexer] at 32", "gate [msa] at 64", "gate [indexer] at 64"]
    assert [s.label for s in sweep.settings[1:]] == labels
    reconfigure(tmp_path / "b" / "gate-64", method={"block_size": 8})
    (sweep,) = load_sweeps(tmp_path / "a" / "gate-64", tmp_path / "b")
    assert [s.label for s in sweep.settings] == ["gate b8 at 64", "gate b16 at 64"]
    for name, size in (("a", 16), ("b", 8)):
        method = {"name": "h2o+gate", "block_size": None, "gate.block_size": size}
        reconfigure(tmp_path / name / "gate-64", method=method)
    (sweep,) = load_sweeps(tmp_path / "a" / "gate-64", tmp_path / "b")
    assert {s.series for s in sweep.settings} == {"h2o+gate, gate.block_size=8", "h2o+gate, gate.block_size=16"}


def test_figures_of_different_contexts_are_not_compared(runs, report):
    same = "4 windows of 8 tokens of dense's own generations, the same for every method"
    assert report.markdown.read_text().count(same) == 2
    path = runs / "quest-64" / "proxies.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"contexts": "other"}))
    apart = write_report(runs)
    text = apart.markdown.read_text()
    assert "the same for every method" not in text and text.count("not known to be the same for all settings") == 2
    assert not [line for line in apart.findings if line.startswith("recall")]
