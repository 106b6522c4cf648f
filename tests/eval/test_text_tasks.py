"""Needles and texts through the evaluation: what is stored, and what the report says of it."""

import json
import random
from dataclasses import replace

import pytest
import torch

import seergate
from seergate import GateBank, GateConfig
from seergate.cli.eval import run_and_report
from seergate.eval import RunOptions, make_task, store, sweep
from seergate.eval.generation.batch import Batch
from seergate.eval.generation.costs import RowStats
from seergate.eval.report import Sweep, load_sweeps, write_report
from seergate.eval.report.plots import text_plot
from seergate.eval.report.tables import TEXTS, minus_gate, table
from seergate.eval.run_plan import directory_of, each_task
from seergate.eval.settings import grid, with_each
from seergate.eval.statistics.metrics import derive, of_texts
from seergate.eval.sweep_plan import SweepPlan
from seergate.eval.tasks.prompts import encode
from seergate.eval.teacher_forcing import TeacherForcing
from tests.support import evaluation as support
from tests.support.running import output_of, refusal, refused, run_seergate


def write_texts(path, length, numbers):
    words = sorted(word for word in support.tokenizer().get_vocab() if not word.startswith("<"))
    texts = [" ".join(words[(7 * i * j + j) % len(words)] for j in range(length + i)) for i in numbers]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return str(path)


@pytest.fixture
def data(tmp_path):
    return write_texts(tmp_path / "texts.jsonl", 150, range(4))


@pytest.mark.slow
def test_texts_are_scored_and_reported(tmp_path, data, monkeypatch):
    model, tokenizer = support.model(), support.tokenizer()
    task = make_task("perplexity:length=120:scored=24", data=data)
    specs = grid(["dense", "quest", "streaming_llm:interval=1"], [16, 256], 8)
    seen = []
    options = RunOptions(on_progress=seen.append)
    metrics = sweep(model, tokenizer, task, specs, tmp_path / "runs", options)
    assert [now.done for now in seen if now.label == "dense"] == [1, 2, 3, 4] and seen[0].correct is None
    samples = store.read_samples(tmp_path / "runs" / "quest-16")
    assert [s["problem_id"] for s in samples] == ["text-1", "text-2", "text-3", "text-4"]
    assert all(len(s["kl"]) == s["n_tokens"] == 24 for s in samples)
    assert metrics["quest-16"] == json.loads((tmp_path / "runs" / "quest-16" / "metrics.json").read_text())
    assert metrics["quest-16"]["kl"] > 1e-5 > 1e-6 > metrics["quest-256"]["kl"]
    assert metrics["quest-16"]["kl_low"] < metrics["quest-16"]["kl"] < metrics["quest-16"]["kl_p99"]
    # a text's loss, by a forward pass of its own
    (text,) = (p.prompt for p in task.bound(tokenizer).problems()[:1])
    ids = torch.tensor([encode(tokenizer, text)])
    ids = ids[:, (ids.shape[1] - 120) // 2 :][:, :120]
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(ids).logits[0, -25:-1], ids[0, -24:])
    assert samples[0]["dense_loss"] == pytest.approx(float(loss), rel=1e-4)

    kept = tmp_path / "runs" / "dense" / "samples.jsonl"
    whole = kept.read_text()
    support.edit_samples(kept.parent, lambda rows: rows[1:])
    seen.clear()
    assert sweep(model, tokenizer, task, specs, tmp_path / "runs", options)["dense"]["kl"] == metrics["dense"]["kl"]
    (now,) = seen
    assert (now.done, now.made, now.tokens) == (4, 1, 24), "three texts were there: they say nothing about the pace"
    kept.write_text(whole.replace('"dense_loss"', '"densloss"', 1))
    refused("line 1 has a sample without 'dense_loss'", load_sweeps, tmp_path / "runs")
    kept.write_text(whole)  # with the seconds that the metrics have

    monkeypatch.setattr(TeacherForcing, "measure", lambda *_: pytest.fail("all texts have been scored"))
    assert sweep(model, tokenizer, task, specs, tmp_path / "runs", options) == metrics
    report = write_report(tmp_path / "runs")
    page = report.markdown.read_text()
    assert len(report.findings) == 5 and report.findings[0].startswith("dense: KL to dense attention 0.0000")
    assert "- quest at 256, streaming_llm at 256 read the whole context" in page
    assert "4 texts of 120 tokens were scored." in page and "accuracy" not in page
    assert "](kl.png)" in page and "KL, 99th percentile |" in page and "nan" not in page


@pytest.mark.slow
def test_settings_are_compared_with_the_first_gates_at_the_same_budget(tmp_path):
    model, tokenizer = support.model(), support.tokenizer()
    banks = {name: GateBank.for_model(model, GateConfig(8, 16, scorer=name)) for name in ("attn_gate", "msa")}
    data = write_texts(tmp_path / "texts.jsonl", 90, range(1, 4))
    task = make_task("perplexity:length=65:scored=8", data=data)
    specs, runs = with_each(grid(["dense", "gate", "streaming_llm:interval=1"], [16, 32], 8), banks), tmp_path / "runs"
    sweep(model, tokenizer, task, specs, runs, RunOptions(), gates=banks)
    (report,) = load_sweeps(runs)
    dense, ours, theirs = report.settings[0], report.at("gate [msa]", 16), report.at("gate [attn_gate]", 16)
    assert dense is report.dense and ours is not None and theirs is not None
    assert minus_gate(report, dense) is None and minus_gate(report, theirs) is None
    apart = minus_gate(report, ours)
    assert apart is not None and apart.mean == pytest.approx(ours.metrics["kl"] - theirs.metrics["kl"])
    each = [
        torch.tensor([sum(text["kl"]) / 8 for text in store.read_samples(runs / name)], dtype=torch.float64)
        for name in ("gate-16-attn_gate", "gate-16-msa")
    ]
    error = 4.302653 * float((each[1] - each[0]).std()) / 3**0.5  # Student's t of two degrees of freedom
    assert [apart.low, apart.high] == pytest.approx([apart.mean - error, apart.mean + error])
    assert minus_gate(report, replace(ours, samples=ours.samples[1:])) is None, "the gate has scored another text"

    def limited(s, threshold):
        method = s.config["method"] | {"token_budget": None, "threshold": threshold, "nominal": f"over {threshold}"}
        return replace(s, config=s.config | {"method": method})

    low, high = limited(theirs, 0.1), limited(ours, 0.2)
    thresholds = Sweep([dense, low, high, limited(ours, 0.1)])
    assert [minus_gate(thresholds, s) for s in thresholds.settings] == [None, None, None, apart]
    assert "| over 0.2 |" in table(thresholds, TEXTS, [high])

    one = [replace(s, samples=s.samples[:1]) for s in (dense, theirs, ours)]  # of one text there is no interval
    (alone,) = table(Sweep(one), TEXTS, one[2:]).splitlines()[2:]
    (with_ends,) = table(report, TEXTS, [ours]).splitlines()[2:]
    assert f"{apart.mean:+.4f} (" in with_ends and with_ends.count("(") == 3 and alone.count("(") == 2
    assert "nan" not in with_ends + alone
    own = replace(low, config=low.config | {"method": low.config["method"] | {"name": "own"}}, series="own")
    drawn = text_plot(Sweep([*report.settings, high, own]), tmp_path / "kl.png")  # the class of one is not known
    assert drawn is not None and drawn.stat().st_size > 20_000
    text = drawn.with_suffix(".svg").read_text()
    lines = ["gate [msa]", "gate [attn_gate]", "streaming_llm", "gate [msa], thresholds", "own, thresholds"]
    assert [text.count(f"<!-- {line} -->") for line in lines] == [2, 2, 1, 2, 1], "gates are in both panels"
    assert text_plot(Sweep(report.settings[1:]), tmp_path / "none.png") is None
    drawn = text_plot(Sweep([dense, theirs, ours]), tmp_path / "gates.png")
    assert drawn is not None and drawn.with_suffix(".svg").read_text().count(f"<!-- {ours.series} -->") == 1


def test_one_text_has_no_interval():
    text = {"kl": [0.1, 0.3], "loss": 1.0, "dense_loss": 0.9, "agreement": 0.5, "n_tokens": 2, "seconds": 1.0}
    metrics = of_texts([text])
    assert metrics["kl"] == pytest.approx(0.2)
    assert metrics["kl_low"] is metrics["kl_p99_high"] is metrics["kl_se"] is None
    two = of_texts([text, {**text, "kl": [0.2, 0.4]}])
    # means .2 and .3: .25 ± t(1) * .05
    assert (two["kl_low"], two["kl_high"]) == pytest.approx((0.25 - 12.7062 * 0.05, 0.25 + 12.7062 * 0.05), rel=1e-4)
    assert two["kl_p99_low"] == pytest.approx(0.3) and two["kl_p99_high"] == pytest.approx(0.4)
    names = ("own_bytes_peak", "own_bytes_mean")
    metrics = of_texts([text | dict(zip(names, each, strict=True)) for each in ((10.0, 4.0), (30.0, 8.0))])
    assert [metrics[name] for name in names] == [30, 6], "the peak is that of the worst text"


def test_a_model_whose_logits_are_not_finite_is_not_measured(tmp_path, data):
    model = support.model()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    arguments = support.tokenizer(), make_task("perplexity:length=120:scored=24", data=data), grid(["dense"], [], 8)
    refused("the model's logits are not finite", sweep, model, *arguments, tmp_path, RunOptions())


def test_the_peak_of_a_text_counts_its_prompt():
    model = support.model()
    ids = torch.randint(6, 40, (1, 120), generator=torch.Generator().manual_seed(1))
    texts = TeacherForcing(model, ids, prompt=79)
    token = 4 * 2 * sum(model.config.num_key_value_heads * model.config.head_dim for _ in model.model.layers)
    for spec, peak in zip(grid(["dense", "streaming_llm:interval=1"], [16], 8), (119, 79), strict=True):
        metrics = texts.measure(spec, None, 0)
        assert metrics["own_bytes_peak"] == peak * token > metrics["own_bytes_mean"], spec.label


def test_figures_of_texts_do_not_depend_on_the_order_of_their_samples():
    """From ten texts on, names in order are not numbers in order."""
    draw = random.Random(0)
    alike = {"sample_idx": 0, "loss": 1.0, "dense_loss": 0.9, "agreement": 0.5, "n_tokens": 20, "seconds": 1.0}
    kl = {f"text-{i}": [draw.expovariate(1.0) for _ in range(20)] for i in range(1, 13)}
    texts = [alike | {"problem_id": name, "kl": values} for name, values in kl.items()]
    metrics = derive(texts, None)
    assert metrics == derive(texts[::-1], None) == derive(store.in_order(texts), None)
    assert metrics["kl_p99_low"] < metrics["kl_p99"] <= metrics["kl_p99_high"]


def test_the_right_answer_has_its_log_probability(tmp_path):
    """What `seergate.score` says of it; and a map of lengths and depths is drawn."""
    model, tokenizer = support.model(), support.tokenizer()
    task = make_task("needle:length=120+160:depths=0+100:problems=5:values=2:chat=true").bound(tokenizer)
    specs = grid(["dense", "quest", "h2o:interval=4"], [16], 8)
    metrics = sweep(model, tokenizer, task, specs, tmp_path, RunOptions(batch_size=2))
    methods = {"dense": ("dense", {}), "h2o-16-interval=4": ("h2o", {"token_budget": 16, "interval": 4})}
    methods["quest-16"] = ("quest", {"token_budget": 16, "block_size": 8, "dense_layers": ()})
    assert methods.keys() == metrics.keys()
    for label, (method, options) in methods.items():
        for sample in store.read_samples(tmp_path / label)[:3]:
            reply = next(p.reply for p in task.problems() if p.problem_id == sample["problem_id"])
            start = len(encode(tokenizer, sample["prompt"]))
            ids = torch.tensor([encode(tokenizer, sample["prompt"] + reply)])
            with seergate.attached(model, method, **options):
                expected = float(seergate.score(model, ids, start=start).log_probs.sum())
            assert sample["reply_logprob"] == pytest.approx(expected, rel=1e-4), label
            assert sample["density"] > 0
    assert metrics["quest-16"]["reply_logprob"] != metrics["dense"]["reply_logprob"]
    report = write_report(tmp_path)
    assert "depth.png" in {plot.name for plot in report.plots}
    page = report.markdown.read_text()
    assert "log p of the answer |" in page and "not clearly better than guessing" in page


def test_a_model_that_is_not_the_tiny_reasoner_needs_a_task(tmp_path):
    model = str(support.save(tmp_path / "model"))
    message = "task is missing, and chain_sum, the default, is for tiny-reasoner only"
    refused(message, each_task, SweepPlan(model=model))
    assert [plan.task for plan in each_task(SweepPlan())] == [""]
    plans = [(x.task, x.out) for x in each_task(SweepPlan(model=model, task="needle:keys=2,perplexity", out="here"))]
    assert plans == [("needle:keys=2", "here/needle-keys=2"), ("perplexity", "here/perplexity")]
    spaced = each_task(SweepPlan(model=model, task="needle, perplexity,"))
    assert [plan.task for plan in spaced] == ["needle", "perplexity"]
    assert [plan.task for plan in each_task(SweepPlan(model=model, task="needle,"))] == ["needle"]
    refused("task is ',', which names none", each_task, SweepPlan(model=model, task=","))
    (tmp_path / "more").mkdir()
    files = [tmp_path / "a.jsonl", tmp_path / "more" / "a.jsonl"]
    for file in files:
        file.touch()
    same = f"{files[0]},{files[1]}"
    refused("of which two would be in one directory", each_task, SweepPlan(model=model, task=same))
    names = [directory_of(task) for task in (str(files[1]), f"needle:data={files[1]}")]
    assert names == ["a", f"needle-data={str(files[1]).replace('/', '-')}"]


def test_one_command_evaluates_several_tasks(tmp_path, data):
    model, gates = support.save(tmp_path / "model"), tmp_path / "gates"
    GateBank.for_model(support.model(), GateConfig(8, 16)).save_pretrained(gates)
    tasks = "needle:length=130,perplexity:length=120:scored=24"
    given = ["--model", str(model), "--gates", str(gates), "--task", tasks, "--problems", "2", "--data", data]
    output = output_of("eval", *given, "--budget", "32", "--threads", "1", "--out", str(tmp_path / "runs"))
    for name in ("needle-length=130", "perplexity-length=120-scored=24"):
        place = tmp_path / "runs" / name
        assert f"report: {place / 'report.md'}" in output
        assert [len(store.read_samples(place / label)) for label in ("dense", "gate-32")] == [2, 2]
    assert "gate at 32: KL to dense attention" in output
    assert output.count("sampling: ") == 1, "texts that are scored are not sampled"
    for text, said in (
        ("perplexty", "did you mean 'perplexity'?"),
        ("perplexity", "samples is 1; the task"),
        ("variable_tracking:length=9000", "the model has 4,096 positions"),
    ):
        task = ["--task", f"needle:length=130,{text}", "--samples", "1"]
        assert said in refusal(run_seergate("eval", *given[:4], *task, "--out", str(tmp_path / "other")))
    assert not (tmp_path / "other").exists(), "refused before the first task"
    mine = tmp_path / "other" / place.name / "report.md"
    mine.parent.mkdir(parents=True)
    mine.write_text("# Mine\n")
    command = ["eval", *given, "--budget", "32", "--out", str(tmp_path / "other")]
    assert "report.md is not a report of seergate's" in refusal(run_seergate(*command))
    assert [path.name for path in (tmp_path / "other").iterdir()] == [place.name], "refused before the first task"


def test_every_task_has_all_threads(tmp_path, monkeypatch):
    """`run_plan` divides them among workers, and leaves the process with fewer."""
    seen, before = [], torch.get_num_threads()

    def run_plan(plan):
        seen.append(torch.get_num_threads())
        torch.set_num_threads(1)
        return tmp_path

    monkeypatch.setattr("seergate.eval.run_plan.run_plan", run_plan)
    torch.set_num_threads(3)
    try:
        run_and_report(SweepPlan(task="chain_sum:problems=1,variable_tracking:length=300:problems=1"), report=False)
    finally:
        torch.set_num_threads(before)
    assert seen == [3, 3]


def test_answers_in_which_the_grader_finds_nothing_are_told_of(tmp_path):
    rows = [{"prompt": f"[a{i}] \\boxed{{", "answer": "3"} for i in (1, 2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--model", str(support.save(tmp_path / "model")), "--task", str(tmp_path / "rows.jsonl")]
    given += ["--grader", "digit", "--method", "dense", "--max-new-tokens", "4", "--temperature", "0"]
    given += ["--out", str(tmp_path / "runs")]
    note = "note: the grader 'digit' found no answer in 2 of 2 samples of dense; `seergate eval show`"
    assert note in output_of("eval", *given)
    assert "no result was found in many answers: dense (100 %)" in (tmp_path / "runs" / "report.md").read_text()


@pytest.mark.parametrize("method", ["dense", "quest"])
def test_tokens_that_are_scored_together_are_not_held_before_their_turn(method):
    """What a row holds at a step is the same as if it was decoded token by token."""
    model, ids = support.model(), torch.randint(6, 40, (1, 120), generator=torch.Generator().manual_seed(1))
    held = []
    for one_by_one in (False, True):
        options = {} if method == "dense" else {"token_budget": 32, "block_size": 8, "dense_layers": ()}
        with torch.inference_mode(), seergate.attached(model, method, **options) as handle:
            stats = handle.count_with(RowStats)
            if one_by_one:
                batch = Batch(model)
                batch.add([ids[0, :70].tolist()])
                stats.add_rows(1)
                for token in ids[0, 70:-1].tolist():
                    batch.step([token])
            else:
                seergate.score(model, ids, start=70)
            held.append(stats.of(0)["own_bytes_mean"])
    assert held[0] == pytest.approx(held[1], rel=1e-9)


def test_sampling_and_limits_of_a_task_that_scores_texts_are_refused(tmp_path):
    command = ["eval", "--task", "perplexity:length=64:scored=8", "--budget", "64", "--out", str(tmp_path / "out")]
    for given in (["--temperature", "0.7"], ["--max-total-tokens", "300"], ["--samples", "3"]):
        assert "scores texts, so it must be left out" in refusal(run_seergate(*command, *given))


def test_a_right_answer_is_not_measured_on_pages(tmp_path):
    """They cannot be copied; the answers are there nevertheless."""
    given = ["--method", "dense,reason_cache", "--task", "variable_tracking:length=128:problems=1", "--no-report"]
    given += ["--model", str(support.save(tmp_path / "model")), "--max-new-tokens", "4"]
    output_of("eval", *given, "--out", str(tmp_path / "runs"))
    dense, shared = load_sweeps(tmp_path / "runs")[0].settings
    assert dense.metrics["reply_logprob"] is not None and shared.metrics.get("reply_logprob") is None
