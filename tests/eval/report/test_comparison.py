"""Reports on many methods at once: how they are told apart, drawn, and compared by bytes."""

import json

import pytest

from seergate.config import SCORERS
from seergate.eval.report import load_sweeps, write_report
from seergate.eval.report.plots import line_style, panels, style
from seergate.methods import METHODS
from tests.support.evaluation import edit_samples
from tests.support.made_reports import cells, write_method


def set_bytes(directory, resident, read):
    sizes = {"own_bytes_mean": resident, "bytes_read_per_step": read}
    edit_samples(directory, lambda rows: [row | sizes for row in rows])


def test_every_method_has_a_look_and_a_place_of_its_own():
    looks = [kind.plot_style for kind in METHODS.values()]
    gates = [kind.plot_style for kind in SCORERS.values() if kind.plot_style]
    assert None not in looks and len({*looks, *gates}) == len(looks) + len(gates) > len(looks)
    assert style("gate [msa]")["color"] == "#AA3377" and style("gate [mine]") == style("gate")
    assert style("h2o+gate, interval=8")["color"] == style("h2o")["color"]
    assert style("h2o+gate")["fillstyle"] == "bottom" and "fillstyle" not in style("h2o, x=a+b")
    assert line_style("h2o+gate", ["h2o", "tova", "h2o+gate"]) != line_style("h2o", ["h2o", "tova", "h2o+gate"])
    assert style("mean_key") == style("short_keys"), "one's own methods may share a spare colour"
    assert line_style("mean_key", both := ["gate", "mean_key", "short_keys"]) != line_style("short_keys", both)


def test_options_tell_series_apart_only_where_they_must(tmp_path):
    for window, budget, ratio in ((4, 32, 4), (8, 64, 8)):
        calibrated = write_method(tmp_path, "h2o", budget, bool, interval=1, window=window)
        calibrated.rename(calibrated.with_name(f"h2o-{budget}-interval=1-window=auto"))
        write_method(tmp_path, "snapkv", 64, bool, window=window, kernel=7)
        write_method(tmp_path, "rpc", None, bool, ratio=ratio, nominal=f"1/{ratio} of the answer")
    (sweep,) = load_sweeps(tmp_path)
    labels = ["h2o at 32", "h2o at 64", "snapkv, window=4 at 64", "snapkv, window=8 at 64"]
    assert [s.label for s in sweep.settings] == [*labels, "rpc, ratio=4", "rpc, ratio=8"]


def test_what_is_not_set_is_no_part_of_a_name(tmp_path):
    """Runs of before the block size was always recorded; options that one setting leaves out."""
    for size, compat, top_p in ((None, None, 0.9), (2, "published", 0.95)):
        write_method(tmp_path, "reason_cache", None, bool, block_size=size, nominal="all")
        write_method(tmp_path, "gate", 64, bool, compat=compat, top_p=None)
        write_method(tmp_path, "quest", None, bool, top_p=top_p, nominal=f"top-p {top_p}")
    (sweep,) = load_sweeps(tmp_path)
    labels = {"reason_cache", "reason_cache b2", "gate at 64", "gate, compat=published at 64"}
    assert {s.label for s in sweep.settings} == labels | {"quest, top_p=0.9", "quest, top_p=0.95"}
    assert "None" not in write_report(tmp_path).markdown.read_text().partition("## How it was run")[0]


def test_the_gates_limits_are_those_of_what_it_reads_for(tmp_path):
    """A method that shares blocks reads by its gate's budget or threshold; an evictor has a budget of its own."""
    write_method(tmp_path, "dense", None, lambda i: True, nominal="all")
    gate = {"gate.dense_layers": [], "gate.threshold": None, "block_size": 8}
    for budget in (32, 64):
        limit = {"gate.token_budget": budget, "nominal": str(budget)}
        write_method(tmp_path, "reason_cache+gate", None, lambda i: True, **{**gate, **limit})
        limit = {"gate.token_budget": budget, "nominal": f"64, reads {budget}"}
        write_method(tmp_path, "h2o+gate", 64, lambda i: True, **limit)
    limit = {"gate.token_budget": None, "gate.threshold": 0.02, "nominal": "p > 0.02"}
    write_method(tmp_path, "reason_cache+gate", None, lambda i: True, **{**gate, **limit})
    (sweep,) = load_sweeps(tmp_path)
    labels = ["dense", *(f"h2o+gate, gate.token_budget={budget} at 64" for budget in (32, 64))]
    labels += [f"reason_cache+gate{limit}" for limit in (" at 32", " at 64", ", threshold 0.02")]
    assert [s.label for s in sweep.settings] == labels
    assert [s.budget for s in sweep.of("reason_cache+gate")] == [32, 64]
    assert any(line.startswith("reason_cache+gate at 32 tokens") for line in write_report(tmp_path).findings)


@pytest.fixture
def many(tmp_path):
    write_method(tmp_path, "dense", None, lambda i: i < 18, nominal="all")
    for name in ("gate", "quest", "h2o", "tova", "snapkv", "random_evict", "raas", "streaming_llm"):
        for budget in (32, 64):
            good = {"gate": 18, "snapkv": 14, "tova": 0}.get(name, 6)
            directory = write_method(tmp_path, name, budget, lambda i, good=good: i < good)
            set_bytes(directory, 64000 + budget, budget * 100)
    set_bytes(write_method(tmp_path, "kv4bit", None, lambda i: i < 17, nominal="all, in 4 bits"), 21000, 30000)
    return tmp_path


def test_a_crowd_is_drawn_in_two_panels(many):
    (sweep,) = load_sweeps(many)
    evictors = ["streaming_llm", "h2o", "tova", "snapkv", "raas", "random_evict"]
    assert list(panels(sweep).values()) == [["gate", "quest"], evictors]
    report = write_report(many)
    assert [plot.name for plot in report.plots] == ["accuracy.png", "bytes.png", "length.png"]
    assert all(plot.stat().st_size > 20_000 for plot in report.plots)


def test_what_is_said_of_many_methods(many):
    report = write_report(many)
    findings, text = "\n".join(report.findings), report.markdown.read_text()
    # one problem of twenty lost, one more lost and one won: -4.5 ± 2.080 * 8.0
    assert "kv4bit (all, in 4 bits) is -5.0 (-21 to +12) points from dense, and holds 30 % of its bytes." in findings
    # 18 of 20 against 14: four won and none lost may be chance; against 6 and 0 more
    gate = "gate is ahead (behind), with an interval that excludes zero, at equal budgets: "
    gate += "streaming_llm 2 (0) of 2, h2o 2 (0) of 2, tova 2 (0) of 2, snapkv 0 (0) of 2, raas 2 (0) of 2"
    assert gate in findings
    control = "random_evict, the control of all evictors, is ahead (behind), with an interval that excludes zero"
    assert control in findings and "h2o 0 (0) of 2, tova 2 (0) of 2, snapkv 0 (2) of 2" in findings
    assert "gate minus quest" in findings and "gate minus h2o" not in findings
    assert "compare the two by bytes" in text
    assert "| kv4bit        | all, in 4 bits |" in text


def test_methods_at_equal_bytes(many):
    names = ("target", "target_bytes", "method", "label", "knob", "value", "bytes", "matched")
    matches = [
        ("32 tokens", 60000.0, "h2o", "h2o-32", "token_budget", 32, 60100.0, True),
        ("32 tokens", 60000.0, "gate", "gate", "token_budget", 8, 240000.0, False),
        ("kv4bit", 21000.0, "tova", "tova-64", "token_budget", 64, 21500.0, True),
    ]
    matches = [dict(zip(names, match, strict=True)) for match in matches]
    (many / "matching-resident.json").write_text(json.dumps({"measure": "resident", "matches": matches}))
    text = write_report(many).markdown.read_text()
    rows = cells(text)
    # h2o holds 64032 bytes: 6.7 % more than 60000; 6 of 20 right; twelve lost, one more lost and one won
    assert ["32 tokens", "h2o", "32", "64.0", "+7", "30.0", "14.5 to 51.9", "-60.0 (-81 to -28)"] in rows
    assert ["kv4bit", "kv4bit", "all, in 4 bits", "21.0", "+0", "85.0", "64.0 to 94.8", "-5.0 (-21 to +12)"] in rows
    assert [r[1] for r in rows if r[0] == "kv4bit" and r[1] in ("kv4bit", "tova")] == ["kv4bit", "tova"]
    assert "not possible at 32 tokens: gate (+300 %)" in text
    assert text.index("## At equal resident bytes") < text.index("## How it was run")
