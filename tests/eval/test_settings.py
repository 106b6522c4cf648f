"""Methods as text, the grid they make, and options that are measured before they are used."""

import json

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, DynamicCache

from seergate import GateBank, GateConfig, Rectify, attached, methods
from seergate.eval import MethodSpec, RunOptions, Sampling, evaluate, make_task
from seergate.eval.calibration.calibrator import Calibrator, check_auto, evenly_chosen_prompts, other_problems
from seergate.eval.generation.samples import Job, Limit
from seergate.eval.generation.served import generate_by_server, plugin_settings, served_from
from seergate.eval.method_text import read_method, value_text
from seergate.eval.report import load_sweeps
from seergate.eval.settings import grid
from seergate.eval.store import read_samples
from seergate.eval.sweep_plan import SweepPlan
from seergate.serving.common.settings import Settings
from tests.support import evaluation as support
from tests.support.running import invalid, refused


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dense", ("dense", {})),
        ("lazy_eviction:window=16:use_h2=false", ("lazy_eviction", {"window": 16, "use_h2": False})),
        ("lazy_eviction:alpha=5e-4", ("lazy_eviction", {"alpha": 5e-4})),
        ("quest:dense_layers=0+1:block_size=16", ("quest", {"dense_layers": (0, 1), "block_size": 16})),
        ("quest:dense_layers=none", ("quest", {"dense_layers": ()})),
        ("tri_attention:centres=runs/a.b/c.safetensors", ("tri_attention", {"centres": "runs/a.b/c.safetensors"})),
        ("gate:compat=published:top_p=none", ("gate", {"compat": "published", "top_p": None})),
        ("snapkv+gate:read_budget=32:window=8", ("snapkv+gate", {"read_budget": 32, "window": 8})),
        ("reason_cache+gate:warm_up=4:top_p=0.9", ("reason_cache+gate", {"warm_up": 4, "top_p": 0.9})),
    ],
)
def test_methods_as_text(text, expected):
    assert read_method(text) == expected
    name, options = expected
    again = ":".join([name, *(f"{key}={value_text(value)}" for key, value in options.items())])
    assert again == text.replace("5e-4", "0.0005")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lazy:window=3", "there is no method 'lazy'"),
        ("lazy_eviction:windows=3", "no option 'windows'; did you mean 'window'"),
        ("lazy_eviction:window", "must be OPTION=VALUE"),
        ("lazy_eviction:window=", "must be OPTION=VALUE"),
        ("h2o:interval=2:interval=3", "'interval' twice"),
        ("quest:dense_layers=0,1", "whole numbers with \\+"),
        ("gate:block_size=16", "no option 'block_size'"),
        ("oracle+gate:read_budget=8", "only a method that evicts"),
        ("h2o+gate+gate:read_budget=8", "only a method that evicts"),
        ("reason_cache+gate:reads=quest", "no option 'reads'"),
    ],
)
def test_text_that_is_no_method(text, said):
    refused(said, read_method, text)


def test_a_grid_with_options():
    texts = [
        "rpc:ratio=8",
        "rpc",
        "kv4bit",
        "h2o:interval=8",
        "quest:block_size=16",
        "oracle:token_budget=48",
        "dense",
    ]
    specs = grid(texts, [64, 32], [8, 16], None, [0.1])
    assert [spec.label for spec in specs] == [
        *("dense", "rpc-ratio=8", "rpc", "kv4bit", "h2o-32-interval=8", "h2o-64-interval=8", "quest-32-block_size=16"),
        *("quest-64-block_size=16", "quest-block_size=16-threshold=0.1", "oracle-48-b8", "oracle-48-b16"),
    ]
    made = {spec.label: spec.method(None) for spec in specs}
    assert made["quest-32-block_size=16"] == methods.Quest(token_budget=32, block_size=16, dense_layers=())
    assert made["h2o-64-interval=8"] == methods.H2O(token_budget=64, interval=8)
    assert made["rpc-ratio=8"] == methods.RPC(ratio=8)
    assert made["oracle-48-b8"] == methods.Oracle(token_budget=48, block_size=8)


def test_methods_that_take_no_threshold_run_with_budgets_only():
    """`--method resa,gate --threshold 0.01`, with budgets beside it and without."""
    task = make_task("chain_sum", problems=1, variables=6)
    bank = GateBank.for_model(support.model(), GateConfig(8, 16))
    texts = ["resa", "gate", "streaming_llm", "reason_cache+gate:structural_check=false"]
    plan = SweepPlan(method=texts, threshold=[0.01], budget=[64])
    specs = plan.specs(task, [8])
    labels = ["resa-64", "gate-64", "gate-threshold=0.01", "streaming_llm-64"]
    labels += [
        f"reason_cache+gate-{x}" for x in ("64-structural_check=false", "structural_check=false-threshold=0.01")
    ]
    assert [spec.label for spec in specs] == labels
    made = [spec.method(bank) for spec in specs]
    assert made[0] == methods.ReSA(token_budget=64, block_size=8) and made[2].threshold == 0.01
    without = [spec.label for spec in SweepPlan(method=texts[:3], threshold=[0.01]).specs(task, [8])]
    resa, window = ([f"{name}-{budget}" for budget in task.budgets] for name in ("resa", "streaming_llm"))
    assert without == [*resa, "gate-threshold=0.01", *window]
    invalid("it has no other rule", grid(["resa:threshold=0.1"], [64], 8)[0].method, None)
    refused("'resa' needs a token budget", grid, ["resa"], [], 8, thresholds=[0.1])


def test_what_a_method_is_given_is_said_in_words():
    bank = GateBank.for_model(support.model(), GateConfig(8, 16))
    for text, nominal in (
        ("dense", "all"),
        ("kv4bit", "all, in 4 bits"),
        ("rpc:ratio=8", "1/8 of the answer"),
        ("h2o", "64"),
        ("resa:share=0.2", "64 or 20 %"),
        ("oracle:threshold=0.01", "p > 0.01"),
        ("gate:budget_share=0.1", "10 %"),
        ("quest:budget_share=0.125:budget_min=64:budget_max=512", "12.5 %, at least 64, at most 512"),
        ("reason_cache", "all"),
        ("reason_cache+gate", "64"),
        ("random_sharing+gate:threshold=0.02", "p > 0.02"),
        ("h2o+gate:read_budget=32", "64, reads 32"),
    ):
        (spec,) = grid([text], [64], 8)
        described = spec.describe(bank)
        assert (described["nominal"], described["name"]) == (nominal, spec.name)
        assert yaml.safe_load(yaml.safe_dump(described)) == described
    assert described["gate.token_budget"] == 32 and described["token_budget"] == 64
    assert spec.has_gates


def test_methods_that_select_no_blocks_have_pages_of_their_own_size():
    """RaaS has 16 in its paper, ReasonCache its engine's 16, or its reading method's; gates on them have theirs."""
    bank = GateBank.for_model(support.model(), GateConfig(8, 16))
    unchecked = ":structural_check=false"
    texts = ["quest", "raas", "raas:block_size=4", "raas+gate:read_budget=32", "reason_cache" + unchecked]
    texts += [f"random_sharing{unchecked}", f"reason_cache+gate{unchecked}"]
    specs = grid(texts, [64], 8)
    descriptions = [spec.describe(bank) for spec in specs]
    expected = [("quest", 8), ("raas", 16), ("raas", 4), ("raas+gate", 16), ("reason_cache", 16)]
    expected += [("random_sharing", 16), ("reason_cache+gate", 8)]
    assert [(each["name"], each["block_size"]) for each in descriptions] == expected
    for spec, (_, size) in zip(specs[4:], expected[4:], strict=True):
        method = spec.method(bank)
        method.tokenizer = support.tokenizer()
        with attached(support.model(), method) as handle:
            cache = DynamicCache(config=handle.model.config)
            handle.model(torch.tensor([[3, 4, 5]]), past_key_values=cache)
            assert cache.layers[0].storage.pages.block_size == size
    assert descriptions[3]["gate.block_size"] == 8
    for size in (8, 16):
        (spec,) = grid(["raas+gate:read_budget=32"], [64], size)
        assert spec.block_size == size, "by which a sweep over sizes finds its gates"


def test_gates_are_evaluated_as_they_ask_to_be():
    """Imported gates carry compat="published"; what is given beside it wins."""
    bank = GateBank.for_model(support.model(), GateConfig(8, 16))
    bank.decode_defaults = {"compat": "published", "threshold": 4e-3, "dense_layers": [0]}
    method = MethodSpec("gate", token_budget=64).method(bank)
    assert (method.compat, method.token_budget, method.threshold, method.dense_layers) == ("published", 64, None, (0,))
    method = MethodSpec("gate", options={"threshold": 0.1, "compat": None}, dense_layers=()).method(bank)
    assert (method.compat, method.threshold, method.dense_layers) == (None, 0.1, ())
    assert MethodSpec("gate", token_budget=64).describe(bank)["compat"] == "published"
    invalid("whose code has no eviction", MethodSpec("h2o+gate", 64, options={"read_budget": 32}).method, bank)


@pytest.mark.slow
def test_sharing_nothing_answers_as_the_method_that_reads(tmp_path):
    """`reason_cache+gate` goes through the engine on pages, and what it reads is chosen by the gate."""
    model = AutoModelForCausalLM.from_pretrained(support.save(tmp_path / "model")).eval()
    tokenizer, bank = support.tokenizer(), GateBank.for_model(model, GateConfig(8, 16))
    bank.decode_defaults = {"dense_layers": [0]}
    task, options = make_task("chain_sum", problems=3, variables=8), RunOptions(max_new_tokens=40, batch_size=2)
    texts = ["gate", "reason_cache:percentile=0", "reason_cache+gate:percentile=0:structural_check=false"]
    answers, density = {}, {}
    for spec in [MethodSpec("dense"), *grid(texts, [32], 8)]:
        metrics = evaluate(model, tokenizer, task, spec, tmp_path / spec.name, options, bank=bank)
        density[spec.name] = metrics["density"]
        samples = read_samples(tmp_path / spec.name)
        answers[spec.name] = {(sample["problem_id"], sample["completion"]) for sample in samples}
    assert answers["reason_cache"] == answers["dense"] != answers["gate"] == answers["reason_cache+gate"]
    assert density["reason_cache"] == 1 > density["gate"] == density["reason_cache+gate"]
    described = spec.describe(bank)
    assert described["gate.dense_layers"] == [0] and described["block_size"] == 8
    assert yaml.safe_load(yaml.safe_dump(described)) == described
    (report,) = load_sweeps(tmp_path)
    assert [s.label for s in report.settings] == ["dense", "gate at 32", "reason_cache", "reason_cache+gate at 32"]
    assert report.methods == ["gate", "reason_cache+gate"] and report.settings[-1].dense_layers == (0,)


def test_auto_is_measured_on_other_problems_and_kept(tmp_path, monkeypatch):
    model, tokenizer = support.model(), support.tokenizer()
    task = make_task("chain_sum", problems=3, variables=6)
    specs = grid(["dense", "lazy_eviction:window=auto:alpha=0.04", "tri_attention:centres=auto"], [12, 4096], 8)
    check_auto(specs)
    others, count = other_problems(task)
    assert count == 4
    prompts = [{p.messages[0]["content"] for p in each.problems()} for each in (others, task)]
    assert not prompts[0] & prompts[1]
    how = {"limit": RunOptions(max_new_tokens=40).limit(task), "sampling": Sampling()}
    calibrated_specs = list(map(Calibrator(model, tokenizer, task, tmp_path, **how), specs))
    assert [spec.label for spec in calibrated_specs] == [spec.label for spec in specs]
    windows = [spec.method(None).window for spec in calibrated_specs if spec.name == "lazy_eviction"]
    assert windows[0] <= 6, "a window must leave room in its budget"
    assert windows[1] > 1
    (centres,) = {spec.method(None).found.fingerprint for spec in calibrated_specs if spec.name == "tri_attention"}
    for name in ("recurrence.WindowCalibration", "query_centres.CentresCalibration"):  # what is kept stays so
        monkeypatch.setattr(f"seergate.eval.calibration.{name}.measure", None)
    again = list(map(Calibrator(model, tokenizer, task, tmp_path, **how), specs))
    assert again == calibrated_specs
    assert {path.name for path in tmp_path.iterdir()} == {"lazy_eviction-0.04.json", "tri_attention.safetensors"}
    described = f"{centres}, from {calibrated_specs[-1].method(None).found.tokens} tokens"
    assert {spec.describe(None)["centres"] for spec in again if spec.name == "tri_attention"} == {described}


def test_a_scored_text_is_measured_on_up_to_its_scored_tokens():
    tokenizer = support.tokenizer()
    task = make_task("perplexity:length=96:scored=32:problems=3").bound(tokenizer)
    whole = [tokenizer(problem.prompt, add_special_tokens=False)["input_ids"] for problem in task.problems()]
    assert evenly_chosen_prompts(tokenizer, task, 3) == [ids[:64] for ids in whole]


def test_what_was_measured_on_something_else_is_measured_anew(tmp_path):
    """Another model of the same shape, another task, limit or sampling."""
    model, tokenizer = support.model(), support.tokenizer()
    specs = grid(["lazy_eviction:window=auto:alpha=0.04", "tri_attention:centres=auto"], [4096], 8)
    kept = tmp_path / "lazy_eviction-0.04.json", tmp_path / "tri_attention.safetensors"

    def made(model=model, variables=6, new=20, sampling=None):
        task = make_task("chain_sum", problems=3, variables=variables)
        how = {"limit": RunOptions(max_new_tokens=new).limit(task), "sampling": sampling or Sampling()}
        calibrated_specs = list(map(Calibrator(model, tokenizer, task, tmp_path, **how), specs))
        described = calibrated_specs[1].describe(None)["centres"]
        return json.loads(kept[0].read_text())["made"], described, [path.stat().st_mtime_ns for path in kept]

    first = made()
    assert made() == first
    sibling = support.model()
    sibling.model.layers[0].self_attn.q_proj.weight.data[0, 0] += 1
    for change, field in (
        ({"model": sibling}, "model"),
        ({"variables": 7}, "contents"),
        ({"new": 25}, "max_new_tokens"),
        ({"sampling": Sampling(1.0)}, "sampling"),
    ):
        other = made(**change)
        assert {name for name in first[0] if first[0][name] != other[0][name]} == {field}
        assert other[1] != first[1] and all(a > b for a, b in zip(other[2], first[2], strict=True))


def test_what_cannot_be_measured_is_refused():
    for text in ("h2o:interval=auto", "lazy_eviction:alpha=auto", "snapkv:window=auto"):
        specs = grid([text], [64], 8)
        refused("only these can be: lazy_eviction:window, tri_attention:centres", check_auto, specs)


def test_auto_finds_shares_and_thresholds_where_bytes_are_made_equal():
    for text in ("gate:budget_share=auto", "quest:threshold=auto"):
        specs = grid([text], [64], 8)
        check_auto(specs, matched=True)
        refused("is 'auto', which finds a value of equal bytes; add --match read", check_auto, specs)
    refused("only these can be", check_auto, grid(["gate:top_p=auto"], [64], 8), matched=True)


def test_a_share_runs_once_whatever_the_budgets():
    specs = grid(["gate", "gate:budget_share=0.1:budget_min=24", "quest:budget_share=0.1"], [64, 128], 8)
    labels = ["gate-64", "gate-128", "gate-budget_min=24-budget_share=0.1", "quest-budget_share=0.1"]
    assert [spec.label for spec in specs] == labels
    bank = GateBank.for_model(support.model(), GateConfig(8, 16))
    assert specs[2].method(bank).block_budget.read(100) == 10 and specs[2].token_budget is None
    served = plugin_settings(specs[2], "org/gates")
    assert served == {"method": "gate", "gates": "org/gates", "budget_share": 0.1, "budget_min": 24}
    assert Settings.read({"seergate": served}).selector(bank, 8).rule == specs[2].method(bank).rule


def test_a_server_reads_no_other_gates_than_these(tmp_path):
    bank = GateBank.for_model(support.model(), GateConfig(8, 16))
    bank.save_pretrained(tmp_path / "run" / "gates")
    loaded = GateBank.from_pretrained(tmp_path / "run" / "gates")
    assert served_from(loaded) == str(tmp_path / "run" / "gates")
    GateBank.for_model(support.model(), GateConfig(8, 16)).save_pretrained(tmp_path / "run")
    part = GateBank.from_pretrained(tmp_path / "run", subfolder="gates")
    assert part.source == str(tmp_path / "run")
    next(loaded.parameters()).data += 1
    job = Job(MethodSpec("gate", 64), 1, (3,), 8, Limit(4), Sampling())
    message = "would get others than these; save these with save_pretrained"
    for other in (bank, part, loaded):
        arguments = "sglang", support.model(), support.tokenizer(), [], job, other, print
        refused(message, generate_by_server, *arguments)


def test_rectification_is_an_option_of_the_text():
    (rectified,) = grid(["quest:rectify_every=8"], [64], 16)
    assert rectified.label == "quest-64-rectify_every=8" and rectified.correction == Rectify(8)
    assert rectified.describe(None)["rectify_every"] == 8 and "rectify_every" not in vars(rectified.method(None))
    (resa,) = grid(["resa:rectify_every=8"], [64], 16)
    assert resa.correction is None and resa.method(None).correction == Rectify(8)
    for text, message in (
        ("quest:rectify_every=0", "every is 0"),
        ("quest:lossless=true", "has no option 'lossless'"),
        ("h2o:rectify_every=8", "has no option 'rectify_every'"),
    ):
        invalid(message, grid, [text], [64], 16)
