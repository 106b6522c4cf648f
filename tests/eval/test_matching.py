"""Budgets that are equal in bytes: the search, and that what is found really takes so many."""

import json
import re
from contextlib import redirect_stdout
from io import StringIO
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seergate import GateBank, GateConfig, SeergateError
from seergate.eval import RunOptions, make_task, store, sweep
from seergate.eval.calibration import matching
from seergate.eval.calibration.matching import CLOSE, FAR, MEASURES, Replay, budget_option_of, distinct
from seergate.eval.report import load_sweeps
from seergate.eval.report.tables import equal_bytes
from seergate.eval.settings import grid
from seergate.eval.store import read_samples
from seergate.eval.sweep_plan import SweepPlan
from tests.support import evaluation as support
from tests.support.running import output_of, refused, run_seergate


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(0, 1200), st.booleans())
@settings(max_examples=200, deadline=None)
def test_the_nearest_is_found_with_few_measurements(steps, target, straight):
    measures = list(accumulate([100.0, *([7] * len(steps) if straight else steps)]))
    measured_values = []

    def measure(value):
        measured_values.append(value)
        return measures[value]

    nearest_value = matching.nearest(range(len(measures)), measure, target)
    best = min(abs(m - target) for m in measures)
    assert abs(measures[nearest_value] - target) <= max(best, CLOSE * target)
    assert len(measured_values) <= 5 or not straight


TOKENS = 2 * 2 * 2 * 16 * 4
"""Bytes of a token in the dense cache of the test model: two layers, two heads, keys and values, float32."""


def run(tmp_path, measure, texts, budgets, scorer="attn_gate"):
    model, tokenizer = support.model(), support.tokenizer()
    bank = GateBank.for_model(model, GateConfig(8, 16, scorer=scorer))
    task = make_task("chain_sum", problems=2, variables=8)
    options = RunOptions(max_new_tokens=80, batch_size=2)  # matching itself replays alone
    specs = distinct(grid(["dense", *texts], budgets, 8))
    arguments = (model, tokenizer, task)
    sweep(*arguments, specs[:1], tmp_path, options, gates=bank)
    replay = Replay(model, tokenizer, matching.replayed(read_samples(tmp_path / "dense")), MEASURES[measure])
    assert replay.bytes_per_token() == TOKENS
    with redirect_stdout(StringIO()) as printed:
        chosen, records = matching.match(replay, specs, budgets, prepare=lambda s: s, banks=bank)
    lines = printed.getvalue().splitlines()
    assert len(lines) == len(texts) - sum("kv4bit" in text or "token_budget" in text for text in texts)
    return sweep(*arguments, chosen, tmp_path, options, gates=bank), chosen, records


def bytes_of(directory):
    """By the answer to the problem whose dense answer is replayed."""
    problem = matching.replayed(read_samples(directory.parent / "dense"))["problem_id"]
    (sample,) = (s for s in read_samples(directory) if s["problem_id"] == problem)
    return sample[MEASURES["resident"]]


@pytest.mark.slow
def test_what_is_matched_holds_so_many_bytes(tmp_path):
    texts = ["gate", "h2o:interval=4", "snapkv:window=6:interval=8", "rpc:interval=16:window=4", "kv4bit:residual=32"]
    results, chosen, records = run(tmp_path, "resident", texts, [64, 150])
    assert {r["target"] for r in records} == {"64 tokens", "150 tokens", "kv4bit-residual=32"}
    for record in records:
        if record["target"] != "kv4bit-residual=32":
            assert record["target_bytes"] == int(record["target"].split()[0]) * TOKENS
        assert record["matched"] == (abs(record["bytes"] / record["target_bytes"] - 1) <= FAR)
        if record["matched"]:  # the sweep made it beside a row of another length, and without the last step
            assert bytes_of(tmp_path / record["label"]) == pytest.approx(record["bytes"], rel=0.01)
    names = ("gate", "h2o-interval=4", "snapkv-interval=8-window=6")
    by_method = {name: [r["matched"] for r in records if r["method"] == name] for name in names}
    assert list(by_method.values()) == [[False] * 3, [True] * 3, [True] * 3]
    assert any(r["matched"] for r in records if r["method"] == "rpc-interval=16-window=4")
    (h2o,) = (r for r in records if r["method"] == "h2o-interval=4" and r["target"] == "kv4bit-residual=32")
    assert bytes_of(tmp_path / h2o["label"]) == pytest.approx(bytes_of(tmp_path / "kv4bit-residual=32"), rel=0.03)
    assert set(results) == {path.name for path in tmp_path.iterdir()}
    labels = [spec.label for spec in chosen]
    assert len(set(labels)) == len(labels) and "gate" not in {spec.name for spec in chosen}


@pytest.mark.slow
def test_retention_gates_are_matched_by_the_token(tmp_path):
    """Their blocks are no unit of what they hold. Options that no budget fits are told."""
    with pytest.raises(SeergateError, match="'snapkv' takes no token budget of up to"):
        run(tmp_path / "none", "resident", ["snapkv:window=4000"], [64])
    _, _, records = run(tmp_path, "resident", ["trim_kv:interval=1"], [66], "trim_kv")
    (record,) = records
    assert record["value"] % 8 and record["bytes"] == pytest.approx(66 * TOKENS, rel=CLOSE)


@pytest.mark.slow
def test_what_is_matched_reads_so_many_bytes(tmp_path):
    results, _, records = run(tmp_path, "read", ["gate", "quest", "tova", "snapkv+gate:read_budget=32:window=6"], [96])
    bytes_per_step = {r["method"]: results[r["label"]]["bytes_read_per_step"] for r in records if r["matched"]}
    assert set(bytes_per_step) >= {"gate", "quest", "tova"}
    for name, measured in bytes_per_step.items():
        assert measured == pytest.approx(96 * TOKENS, rel=FAR + 0.03), name
    budgets = {r["method"]: r["value"] for r in records}
    assert budgets["gate"] < 96 and budgets["quest"] < budgets["gate"], "what is read to decide is paid for"


@pytest.mark.slow
def test_shares_and_thresholds_are_found_at_equal_bytes(tmp_path):
    """With ``auto``, of any method that selects; the sweep then runs the value that is nearest in bytes."""
    texts = ["gate", "gate:budget_share=auto", "gate:threshold=auto", "quest:budget_share=auto"]
    results, chosen, records = run(tmp_path, "read", texts, [96])
    assert [record["knob"] for record in records] == ["token_budget", "budget_share", "threshold", "budget_share"]
    for record in records:
        assert record["matched"] and record["bytes"] == pytest.approx(record["target_bytes"], rel=FAR)
        measured = results[record["label"]]["bytes_read_per_step"]
        assert measured == pytest.approx(96 * TOKENS, rel=FAR + 0.1), record["label"]
    share, threshold = (record["value"] for record in records[1:3])
    assert 0 < share < 1 and 0 < threshold < 0.5
    assert {f"gate-budget_share={share}", f"gate-threshold={threshold}"} < {spec.label for spec in chosen}


@pytest.fixture
def command(tmp_path):
    model = str(support.save(tmp_path / "model"))
    small = ["--problems", "2", "--variables", "8", "--max-new-tokens", "60", "--out", str(tmp_path / "runs")]
    return ["eval", "--task", "chain_sum", "--model", model, *small]


@pytest.mark.slow
def test_a_matched_sweep_by_command_goes_on_where_it_was(command, tmp_path, monkeypatch):
    """Nothing is measured again, also after an interruption; for another budget, only what is new. Matches of other
    variants stay.
    """

    def interrupted(values, measure, target):
        measure(values[0])
        raise KeyboardInterrupt

    def matched():
        return json.loads((tmp_path / "runs" / "matching-resident.json").read_text())

    methods = "dense,streaming_llm:interval=4,lazy_eviction:window=auto:alpha=0.04"
    command += ["--match", "resident", "--method", methods, "--budget"]
    with monkeypatch.context() as patch:
        patch.setattr(matching, "nearest", interrupted)
        assert run_seergate(*command, "48").returncode == 130
    measured = matched()["bytes"]
    assert measured and not matched()["matches"]
    assert "streaming_llm-interval=4, token_budget for 48 tokens: 4" in output_of(*command, "48")
    assert "## At equal resident bytes" in (tmp_path / "runs" / "report.md").read_text()
    before = {path: path.read_bytes() for path in (tmp_path / "runs").glob("*/samples.jsonl")}
    assert len(before) == 3
    with monkeypatch.context() as patch:
        patch.setattr(matching, "Batch", None)
        output_of(*command, "48")
    assert {path: path.read_bytes() for path in (tmp_path / "runs").glob("*/samples.jsonl")} == before
    kept = matched()
    assert measured.items() < kept["bytes"].items()
    output_of(*command, "64")
    more = matched()
    assert kept["bytes"].items() < more["bytes"].items()
    assert [each["target"] for each in more["matches"]] == ["48 tokens"] * 2 + ["64 tokens"] * 2
    assert more["matches"][:2] == kept["matches"]
    output_of(*command, "48", "--method", "dense,streaming_llm:interval=8")
    assert matched()["matches"][:4] == more["matches"] and len(matched()["matches"]) == 5


@pytest.mark.slow
def test_a_matched_sweep_with_other_blocks_or_layers_is_matched_anew(command, tmp_path):
    """The setting may have the name of an existing one, and is refused then."""
    keys, command = set(), [*command, "--budget", "100", "--match", "read", "--method", "dense,quest", "--block-size"]
    for more, what in (
        (["8"], "dense_layers=(), anchors=(), dense_below=0, block_size=8"),
        (["16"], "dense_layers=(), anchors=(), dense_below=0, block_size=16"),
        (["16", "--dense-layers", "0"], "dense_layers=(0,), anchors=(), dense_below=0, block_size=16"),
    ):
        done = run_seergate(*command, *more)
        assert done.returncode == 0 or "with other settings: method.block_size was 8 and is 16" in done.stderr
        matched = json.loads((tmp_path / "runs" / "matching-read.json").read_text())
        new = matched["bytes"].keys() - keys
        keys |= new
        assert new and all(what in method for method in new if method.startswith("(Quest"))
        assert matched["made"]["answer"]["completion"]


def test_gates_are_told_apart_by_their_weights(tmp_path):
    """Whatever they are called: what was measured with others of the same name, or none, is not taken for theirs."""
    model, tokenizer = support.model(), support.tokenizer()
    answer = {"problem_id": "p", "sample_idx": 0, "n_tokens": 2, "prompt": "a1", "completion": "a1 a2"}
    replay = Replay(model, tokenizer, answer, MEASURES["read"])
    (spec,) = grid(["gate"], [16], 8)
    for seed in (0, 1):
        torch.manual_seed(seed)
        replay.bytes(spec, bank := GateBank.for_model(model, GateConfig(8, 16)))
    assert len(replay.known) == 2
    again = Replay(model, tokenizer, answer, MEASURES["read"], dict(replay.known))
    assert again.bytes(spec, bank) in replay.known.values() and again.known == replay.known


GIVEN = ["quest:token_budget=56", "gate:threshold=0.01", "h2o:interval=4:token_budget=24", "quest", "rpc:ratio=3"]


def test_a_budget_that_is_given_with_a_method_is_its_own():
    specs = distinct(grid(["dense", *GIVEN], [64, 128], 8))
    assert [(spec.label, budget_option_of(spec)) for spec in specs] == [
        ("dense", None),
        ("quest-56", None),
        ("gate-threshold=0.01", None),
        ("h2o-24-interval=4", None),
        (f"quest-{matching.EVERYTHING}", "token_budget"),
        ("rpc-ratio=3", None),
    ]
    assert budget_option_of(grid(["rpc"], [64], 8)[0]) == "ratio"


@pytest.mark.slow
def test_what_has_a_budget_of_its_own_is_run_and_matched_to(tmp_path):
    """The same setting, come by twice, is run once."""
    _, chosen, records = run(tmp_path, "read", ["quest:token_budget=56", "quest", "tova"], [96])
    labels = [spec.label for spec in chosen]
    assert labels[:2] == ["dense", "quest-56"] and labels.count("quest-56") == 1
    assert {r["target"] for r in records} == {"96 tokens", "quest-56"}
    assert {r["method"]: r["label"] for r in records if r["target"] == "quest-56"}["quest"] == "quest-56"
    store.write_json(tmp_path / "matching-read.json", {"matches": records})
    (loaded,) = load_sweeps(tmp_path)
    ((_, text),) = equal_bytes(loaded)
    assert len(re.findall(r"^\| quest-56 +\| quest ", text, re.MULTILINE)) == 1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"match": "memory"}, "match is 'memory'; it must be budget, resident or read"),
        ({"match": "read", "method": ["gate"]}, "needs dense among the methods"),
        ({"measure_recall": True, "method": ["gate"]}, "measure_recall needs dense among the methods"),
        ({"match": "read", "threshold": [0.1]}, "give some, and no thresholds"),
        ({"match": "read", "budget": [64], "block_size": [8, 16]}, "give one block size"),
        ({"match": "read", "budget": [64], "method": ["dense", "gate"]}, r"one block size \(these gates have 8, 16\)"),
    ],
)
def test_what_cannot_be_matched_is_refused(values, said):
    plan = SweepPlan.of({"method": ["dense", "oracle"], **values})
    refused(said, plan.specs, plan.make_task(), [8, 16])
