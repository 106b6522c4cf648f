"""Benchmarks run on a small model, record what they promise, and refuse to time wrong results."""

import argparse
import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from seergate import GateBank, GateConfig, methods, ops
from seergate.models.families import head_dim_of
from tests.distill.conftest import byte_tokenizer
from tests.support.models import tiny_model
from tests.support.running import ROOT, Done, run_script

# Smaller models and fewer repetitions; contexts keep their default lengths, which decide how caches grow.
HEADS = "--threads 1 --kv-heads 2 --head-dim 16"
SMALL = {
    "decode": f"{HEADS} --group 2 --gate-dim 8 --repeats 1 --seconds 0.01",
    "distill": f"{HEADS} --group 3 --gate-dim 8 --block-sizes 16 --rounds 1 --lengths 100 256 --baseline-up-to 128",
    "end_to_end": f"{HEADS} --heads 4 --hidden-size 32 --rounds 1 --tokens 3",
    "reason_cache": "--threads 1 --layers 1 --width 32 --rows 3 --requests 4 --length 160 --prompt 8 --step 20 "
    "--repeats 0.8 --page 4 --warm-up 0 --rounds 1",
}
TINY = {
    "anchors": "--threads 1 --texts 1 --lengths 100 --scored 16 --calibration-texts 1 --rows 8 --rounds 1 --steps 1",
    "distill_model": "--threads 1 --hidden-size 64 --lengths 1024 --layers 1 --block-size 16 "
    "--ways seergate materialised",
    "interval_coverage": "--repeats 1",
    "reason_cache_accuracy": "--threads 1 --problems 1 --variables 6 --rounds 1",
    "tiny_reasoner": "--threads 1 --lengths --medium 5 --medium-problems 1 --medium-budgets 32",
}
"""Benchmarks that a test only runs, at the smallest sizes."""
ELSEWHERE = {
    "board": "test_board",
    "estimates": "tests/test_estimates.py",
    "gpu_check": "tests/test_gpu_check.py",
    "kernel_resources": "test_resources_of_kernels_are_listed",
    "serving": "test_board",
}
PARTS = {"collect", "common", "dense_baselines", "tables", "trade_off"}
"""What the benchmarks share, and what shows their results."""


def run(name: str, output: Path, *arguments: str) -> Done:
    """Run a benchmark with small options."""
    sizes = (SMALL | TINY)[name].split()
    return run_script(f"benchmarks/{name}.py", *sizes, "--output", str(output), *arguments)


def record_of(output: Path) -> dict:
    """The record that a benchmark saved."""
    (table,) = output.glob("*.json")
    record = json.loads(table.read_text())
    assert record["machine"]["torch"] and record["machine"]["commit"]
    return record


def recorded(name: str, output: Path, *arguments: str) -> dict:
    """Run a benchmark, which must not fail; its record."""
    done = run(name, output, *arguments)
    assert done.returncode == 0, done.stderr
    return record_of(output)


def test_every_benchmark_is_run_somewhere() -> None:
    files = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert files == SMALL.keys() | TINY.keys() | ELSEWHERE.keys() | PARTS


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_tiny_ones_run_and_record(name: str, tmp_path: Path) -> None:
    runs = ["--runs", str(tmp_path / "runs")] * (name == "tiny_reasoner")
    assert recorded(name, tmp_path, *runs)["rows"]
    if runs:
        collected = [str(tmp_path / "runs/medium-5"), "--name", "collected", "--output", str(tmp_path / "out")]
        assert run_script("benchmarks/collect.py", *collected).returncode == 0
        assert {row["method"] for row in record_of(tmp_path / "out")["rows"]} > {"dense", "gate"}


@pytest.mark.slow
def test_tables_are_printed_and_figures_drawn(tmp_path: Path) -> None:
    assert "| `quest` |" in run_script("benchmarks/tables.py").stdout
    assert run_script("benchmarks/trade_off.py", "--output", str(tmp_path)).returncode == 0
    assert {path.stem for path in tmp_path.glob("*.png")} == {"trade-off", "anchors", "board"}


def test_resources_of_kernels_are_listed() -> None:
    pytest.importorskip("triton")
    done = run_script("benchmarks/kernel_resources.py", "--gpus", "H200", "--only", "update_compressed_keys")
    assert done.returncode == 0 and re.search(r"\b[1-9]\d* kernels, 0 with faults", done.stdout), done.stderr


@pytest.mark.slow
def test_decode(tmp_path: Path) -> None:
    record = recorded("decode", tmp_path)
    assert record["options"]["bandwidth"] > 0
    assert {row["length"] for row in record["rows"]} == {8192, 16384, 32768}
    for row in record["rows"]:
        dense = row[f"{row['best_dense']}_median_ms"]
        assert row["speedup"] == pytest.approx(dense / row["sparse_median_ms"], abs=0.02)
        assert row["roofline_fraction"] > 0 and row["relative_error"] < 1e-4


SHORT = ("--block-size", "16", "--sparsities", "0.5")


@pytest.mark.slow
def test_decode_records_failures_and_keeps_what_it_has_when_it_is_stopped(tmp_path: Path, monkeypatch) -> None:
    """A dense baseline fails at 128 tokens, and the op at 96: out of memory, or stopped."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import dense_baselines

    right, error = ops.sparse_decode, torch.OutOfMemoryError("no memory")

    def moody(q, k, v):
        if k.shape[2] == 128:
            raise ValueError("not at this length\nand more")
        return dense_baselines.sdpa_stock(q, k, v)

    def small(q, k, *rest):
        if k.shape[2] == 96:
            raise error
        return right(q, k, *rest)

    monkeypatch.setitem(dense_baselines.ON_CPU, "moody", moody)
    monkeypatch.setattr(ops, "sparse_decode", small)
    done = run("decode", tmp_path / "all", *SHORT, "--lengths", "64", "96", "128", "192")
    assert done.returncode == 0 and "moody failed: ValueError: not at this length" in done.stdout, done.stderr
    rows = {row["length"]: row for row in record_of(tmp_path / "all")["rows"]}
    assert set(rows) == {64, 96, 128, 192}
    assert rows[64]["failed"] == rows[192]["failed"] == {} and rows[192]["moody_median_ms"] > 0
    assert rows[128]["failed"] == {"moody": "ValueError: not at this length"} and rows[128]["speedup"] >= 0
    assert rows[96]["failed"] == {"cell": "OutOfMemoryError: no memory"} and "speedup" not in rows[96]
    error = SystemExit("no memory")
    assert run("decode", tmp_path / "some", *SHORT, "--lengths", "64", "96").returncode == 1
    assert [row["length"] for row in record_of(tmp_path / "some")["rows"]] == [64]


@pytest.mark.slow
def test_end_to_end(tmp_path: Path) -> None:
    """All default lengths, so that growing buffers are filled and continued in different modes."""
    record = recorded("end_to_end", tmp_path)
    assert set(record["options"]["first_token_seconds"]) == set(record["rows"][0]["ways"])
    assert [row["batch"] for row in record["rows"]] == [1, 1, 1, 1, 1, 4]
    floor, *longer = record["rows"]
    assert floor["lengths"] == [record["options"]["budget"]] and floor["ceiling"] == 1
    assert ["ceiling" in row for row in longer] == [True] * 4 + [False]
    per_token = 2 * 2 * 2 * 16 * 4  # keys and values, two layers, two heads of 16 float32
    for row in longer:
        ways, dense, tokens = row["ways"], row["ways"][row["best_dense"]], sum(row["lengths"])
        assert dense["token_median_ms"] == min(ways[f"hf_{kind}"]["token_median_ms"] for kind in ("static", "dynamic"))
        for name, speedup in row["speedup"].items():
            assert speedup == pytest.approx(dense["token_median_ms"] / ways[name]["token_median_ms"])
        assert ways["dense"]["bytes_read_per_step"] >= tokens * per_token
        for name in ("gate", "gate_offloaded"):
            assert 0 < ways[name]["density"] * tokens <= row["batch"] * 2048 < tokens
        assert 0 < ways["gate_offloaded"]["bytes_fetched_per_step"] <= row["batch"] * 2048 * per_token
        if tokens > 3 * 2048 * row["batch"]:  # else twice the memory for a step's blocks holds nearly all
            assert ways["gate_offloaded"]["resident_bytes_peak"] < ways["gate"]["resident_bytes_peak"]


def test_distill(tmp_path: Path) -> None:
    record = recorded("distill", tmp_path)
    assert record["options"]["backend"] == "torch"
    small, large = record["rows"]
    assert (small["length"], large["length"]) == (100, 256)
    for row in record["rows"]:
        assert max(row[f"{name}_error"] for name in ("loss", "dqg", "dkg")) < 1e-4
        for name in ("gate_kl", "gate_kl_given_lse", "attention_with_block_targets", "plain_attention"):
            assert row[f"{name}_median_ms"] > 0 and row[f"{name}_peak_mb"] >= 0
    assert small["materialised_loss_error"] < 1e-5  # the baseline computes the same
    ratio = small["gate_kl_median_ms"] / small["materialised_median_ms"]
    assert small["time_ratio"] == pytest.approx(ratio, rel=0.1, abs=0.02)
    assert "materialised_peak_mb" not in large


@pytest.mark.slow
def test_reason_cache(tmp_path: Path) -> None:
    record = recorded("reason_cache", tmp_path)
    dense, shared = record["rows"]
    assert record["options"]["max_blocks"] == 120
    assert dense["rows"] == 3 < shared["rows"] and shared["sharing"]["amsr"] > 0.1
    assert record["options"]["rows_ratio"] == shared["rows"] / dense["rows"]
    assert dense["tokens"] == shared["tokens"] == 4 * (160 - 8)


def _wrong_loss(right, *a, **o):
    loss, stats = right(*a, **o)
    return 1.01 * loss, stats


def _wrong_output(right, q, k, v, *a):
    result = right(q, k, v, *a)
    return result._replace(output=1.01 * result.output)


def _wrong_on_long_packs(right, q, k, qg, kg, *a, **o):
    return right(q, k, qg if len(q) < 150 else qg * 1.01, kg, *a, **o)


DECODE, PACKS = [*SHORT, "--lengths", "64"], ["--block-sizes", "16", "--lengths", "256"]
STEPS = ["--block-size", "8", "--budget", "32", "--lengths", "64", "--batch-lengths", "--prompt", "24"]
WRONG = [
    ("decode", DECODE, "sparse_decode", lambda right, *a: 1.01 * right(*a), "sparse_decode has a relative"),
    ("decode", DECODE, "sparse_decode", lambda op, q, k, v, *a: op(q, k, v, *a) + 0 * v.sum(), "sparse_decode has"),
    ("decode", DECODE, "select_blocks", lambda right, x, *a, **rule: right(-x, *a, **rule), "select_blocks with"),
    ("end_to_end", STEPS, "dense_decode", lambda right, *a, **o: -right(*a, **o), "gives other tokens than the plain"),
    ("distill", PACKS, "gate_kl", _wrong_loss, "loss has a relative error"),
    ("distill", PACKS, "attention_with_block_targets", _wrong_output, "output has a relative error"),
    ("distill", PACKS, "gate_kl", _wrong_on_long_packs, "on the tensors to be timed"),
]


@pytest.mark.parametrize(("name", "options", "op", "wrong", "message"), WRONG)
def test_wrong_results_are_not_timed(name, options, op, wrong, message, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(ops, op, partial(wrong, getattr(ops, op)))
    done = run(name, tmp_path, *options)
    assert done.returncode == 1 and message in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


def random_model(folder: Path) -> str:
    """A directory with a random model whose tokens are bytes."""
    tiny_model("qwen3", vocab_size=260).save_pretrained(folder)
    byte_tokenizer(None).save_pretrained(folder)
    return str(folder)


def test_steps_of_a_model_whose_configuration_has_no_width_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen2's width follows from the hidden size."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import end_to_end
    import serving

    model, options = tiny_model("qwen2"), argparse.Namespace(model="tiny", block_size=8)
    del model.config.head_dim  # as in its published configurations
    bank = serving.gates_of(model, options)
    assert bank.config.gate_dim == head_dim_of(model)
    ways = {"gate": end_to_end.Way(methods.Gate(bank=bank, token_budget=16))}
    end_to_end.fill(model, ways, torch.ones(2, 40, dtype=torch.long), 8, 16)
    assert ways["gate"].cache.layers[0].keys.shape[-1] == head_dim_of(model)


SHORT_STEPS = "--lengths 64 --batches 1 --rounds 1 --tokens 3"


@pytest.mark.slow
def test_a_compiled_step_is_timed(tmp_path: Path) -> None:
    given = f"--model {random_model(tmp_path / 'tiny')} --output {tmp_path} --threads 1 --block-size 16 {SHORT_STEPS}"
    done = run_script("benchmarks/serving.py", *given.split(), "--ways", "hf_gate", "hf_gate_compiled")
    assert done.returncode == 0, done.stderr
    (row,) = record_of(tmp_path)["rows"]
    assert row["step_median_ms"].keys() == {"hf_gate", "hf_gate_compiled"}


def test_gates_are_beside_quest_at_the_same_budget_or_else_the_nearest_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import tables

    rows = [
        {
            "model": "smollm2",
            "part": "texts",
            "method": method,
            "budget": budget,
            "kl": kl,
            "bytes_read_per_step": nbytes,
        }
        for method, budget, kl, nbytes in (
            *(("dense", None, 0.0, 100), ("gate", 256, 0.4, 20), ("gate", 512, 0.2, 40), ("gate", 1024, 0.1, 70)),
            *(("quest", 256, 0.8, 40), ("quest", 512, 0.5, 60)),
        )
    ]
    monkeypatch.setattr(tables, "rows_of", lambda name: rows if name == "board" else [])
    _, *lines = tables.gates_and_quest()
    assert [line[1::3] for line in lines] == [("256", "256", "50"), ("512", "512", "40"), ("1024", "512", "20")]
    assert lines[2][3::3] == ("70", "60")


@pytest.mark.slow
def test_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part of a random model, one of them in two goes; the table and the figure have what there is."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import board
    import tables
    import trade_off

    bank = GateBank.for_model(tiny_model("qwen3", vocab_size=260), GateConfig(16))
    bank.save_pretrained(Path(random_model(tmp_path / "tiny")) / "gates")
    (tmp_path / "sums.jsonl").write_text('{"question": "1 + 1?", "answer": "2.\\n#### 2"}\n' * 4)

    def part(name: str, extra: str) -> str:
        given = f"--model {tmp_path}/tiny --runs {tmp_path}/runs --output {tmp_path} --part {name} --threads 1 {extra}"
        done = run_script("benchmarks/board.py", *given.split())
        assert done.returncode == 0, done.stderr
        return done.stdout

    short = "--problems 2 --max-new-tokens 4 --method dense,gate"
    part("texts", "--problems 2 --task perplexity:length=592:scored=16")
    (tmp_path / "shots.jsonl").write_text('{"question": "2 + 1?", "answer": "3.\\n#### 3"}\n' * 4)
    part("gsm8k", f"{short} --task-source {tmp_path}/sums.jsonl --shots-source {tmp_path}/shots.jsonl")
    (tmp_path / "math.jsonl").write_text('{"problem": "1 + 1?", "answer": "2"}\n' * 4)
    part("math500", f"{short} --task-source {tmp_path}/math.jsonl")
    assert "dense: 2/2 answers" in part("humaneval", short)
    assert "dense: 2/2 answers" not in part("humaneval", f"{short},quest")
    anew = short.replace("gate", "quest,gate:rectify_every=2")
    part("humaneval", f"{anew} --runs {tmp_path}/anew")  # the row of the gate without rectification stays
    (tmp_path / "before.py").write_text("ONE = 1\n")
    part("long", f"{short} --data {tmp_path}/before.py")
    part("times", f"--ways hf_static hf_gate {SHORT_STEPS}")
    record = json.loads((tmp_path / "board.json").read_text())
    assert record["options"]["parts"].keys() == {f"tiny/{name}" for name in board.PARTS if name != "needles"}
    assert [row["method"] for row in record["rows"] if row["part"] == "humaneval"] == [
        *("dense", "gate, rectify_every=2", "quest", "gate")
    ]
    (tmp_path / "other").mkdir()
    other = shutil.copy(tmp_path / "board.json", tmp_path / "other")
    board.merged(Path(other), "tiny", "humaneval", {"dtype": "float32"}, [{"method": "tova", "budget": 64}])
    rows = json.loads(Path(other).read_text())["rows"]
    assert [row["method"] for row in rows if row["part"] == "humaneval"] == ["tova"]  # of other conditions
    monkeypatch.setattr(board, "MODELS", ("tiny", "smollm2"))
    monkeypatch.setattr(trade_off, "MODELS", board.MODELS)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    lines = {line[0].strip("*`"): line[1:] for line in tables.all_methods()}
    assert lines["tiny"][:6] == ("2 texts", tables.MISSING, *["2 problems"] * 4)
    assert set(lines["smollm2"][:6]) == {tables.MISSING}
    missing = {name: [i for i in range(10) if not set(lines[name][i]) - {tables.MISSING}] for name in lines}
    assert missing["dense"] == missing["gate"] == [1, 9] and missing["tova"] == [1, 2, 3, 4, 5, 8, 9]
    assert "[" in lines["quest"][4] and lines["quest"][2] == tables.MISSING
    head, *lines = tables.minus_dense("tiny")
    assert len(head) == 5 and {line[0]: line.count(tables.MISSING) for line in lines}["`quest`"] == 3
    record["rows"] += [row | {"model": "smollm2"} for row in record["rows"] if row["part"] == "texts"]
    (tmp_path / "board.json").write_text(json.dumps(record))
    panels = trade_off.draw_board(tmp_path).axes  # a panel per part of a model that was measured
    assert [axes.get_title() for axes in panels if axes.containers] == [axes.get_title() for axes in panels]
    assert [axes.get_title() for axes in panels][:3] == ["tiny: KL", "smollm2: KL", "tiny: GSM8K"] and len(panels) == 7
