"""Every method on real models: KL on texts, needles, GSM8K, MATH-500, HumanEval, and milliseconds per token.

    python benchmarks/board.py                                               # everything: days of two cores
    python benchmarks/board.py --model qwen2.5-coder-0.5b --part humaneval   # one part of one model
    python benchmarks/board.py --model smollm2 --part gsm8k --task-source test.jsonl --problems 16 --gates DIR

Models are the directories models/NAME of `train/recipes/fetch.py`. GSM8K comes from models/gsm8k.jsonl, its four
worked examples from models/gsm8k_train.jsonl and MATH-500 from models/math500.jsonl, if these files exist; otherwise
from the Hub. Other options go to `seergate eval`, such as --gates, --budget and --method; with ``--part times``
alone, they go to `serving.py`, which measures vLLM if `make test-vllm` made its environment. The part ``long`` is
HumanEval behind a module of Python's library (textwrap.py).

Answers are kept in a folder per model, part and number of problems: the same command continues, and more methods or
budgets add to what is there. After each part, its rows go to `benchmarks/results/board.json`. Earlier rows of the
same part stay if they are of other methods or budgets, and of the same problems, precision and sampling. Each row has
the commit that it was measured at. `make results STAGE=board` runs all parts and writes docs/board.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import quote, split
from typing import Any

from collect import rows_of
from common import CPU, RESULTS, provenance, save

from seergate.cli.console import INTERRUPTED
from seergate.cli.main import main as seergate
from seergate.eval.report.load import Setting, apart, load_sweeps
from seergate.eval.settings import grid
from seergate.models.names import gates_for
from seergate.pretrained import load_tokenizer

HERE = Path(__file__).parent
MODELS = ("smollm2", "qwen2.5-coder-0.5b", "gemma3-270m")
GATES = {"smollm2": "checkpoints/smollm2-135m", "qwen2.5-coder-0.5b": "checkpoints/qwen2.5-coder-0.5b"}
"""Model -> its gates, if they are not in ``gates/`` of its directory."""
METHODS = (
    *("dense", "kv4bit:residual=64", "oracle", "gate", "quest", "resa", "random", "streaming_llm:interval=16"),
    *("h2o:interval=16", "tova:interval=16", "snapkv:window=16:interval=16", "r_kv:window=8:interval=16"),
    *("raas:prompt=evictable", "rpc:interval=32:window=16:ratio=4", "lazy_eviction:window=32:alpha=0.001"),
    "random_evict:interval=16:prompt=evictable",
)
"""Evictors evict every 16 tokens, as answers have hundreds; prompts count in every budget and may be evicted."""
FILES = {
    "gsm8k": {"--task-source": "models/gsm8k.jsonl", "--shots-source": "models/gsm8k_train.jsonl"},
    "math500": {"--task-source": "models/math500.jsonl"},
}
"""Task -> options of `seergate eval` with their files, if these exist."""


@dataclass(frozen=True)
class Part:
    """What is measured.

    Attributes:
        title: of its column.
        budget: token budget that the table shows; `seergate eval --budget` takes others.
        problems: number of problems or texts, unless the command line has another.
        chat, base: task for models with and without a chat template.
        options: further options of `seergate eval`, or of `serving.py`.
    """

    title: str
    budget: int
    problems: int = 0
    chat: str = ""
    base: str = ""
    options: str = ""

    def command(self, name: str) -> list[str]:
        """The command line of `seergate eval` for a model."""
        chat = load_tokenizer(path_of(name)).chat_template is not None
        task = self.chat if chat else self.base
        arguments = ["--model", path_of(name), "--task", task, "--budget", str(self.budget), *split(self.options)]
        for option, file in FILES.get(task.partition(":")[0], {}).items():
            arguments += [option, file] if Path(file).exists() else []
        return arguments


PARTS = {
    "texts": Part("KL", 512, 16, *["perplexity:length=2560:scored=64"] * 2, "--dtype float32"),
    "needles": Part("needles", 512, 64, *["needle:keys=4:length=3584"] * 2, "--dtype bfloat16 --batch-size 1"),
    "gsm8k": Part(
        *("GSM8K", 256, 128, *["gsm8k:shots=4"] * 2),
        "--dtype bfloat16 --batch-size 32 --max-new-tokens 400 --temperature 0",
    ),
    "math500": Part(
        *("MATH-500", 256, 128, "math500", "math500:shots=4"),
        "--dtype bfloat16 --batch-size 32 --max-new-tokens 600 --temperature 0 --samples 1",
    ),
    "humaneval": Part(
        *("HumanEval", 128, 164, "humaneval", "humaneval:chat=false"),
        "--dtype bfloat16 --batch-size 32 --max-new-tokens 600 --run-programs",
    ),
    "long": Part(
        *("HumanEval behind 4k", 256, 128, "humaneval", "humaneval:chat=false"),
        f"--dtype bfloat16 --batch-size 32 --max-new-tokens 600 --run-programs --data {quote(textwrap.__file__)}",
    ),
    "times": Part("ms per token", 512, options="--lengths 4096 --batches 1 16 --budget 512"),
}


def path_of(name: str) -> str:
    """The directory of a model: ``models/NAME``, or the name itself."""
    return str(directory) if (directory := Path("models", name)).is_dir() else name


def row_name(setting: Setting) -> str:
    """The method of a row, with its options unless they are the board's, whatever else was run beside it."""
    label = setting.directory.name
    if label in {spec.label for spec in grid(list(METHODS), [setting.budget or 1], 16)}:
        return setting.method
    options = label.removeprefix(setting.method).removeprefix(f"-{setting.budget}").removeprefix("-")
    return f"{setting.method}, {options or 'no options'}"


Measurement = tuple[dict[str, Any], list[dict[str, Any]]]
"""What describes a part's measurement, and its rows."""


def answers(name: str, part: str, out: Path, extra: list[str]) -> tuple[int, Measurement | None]:
    """Run a part with `seergate eval`; its exit status, and what was found, also if it was interrupted."""
    given = ["--out", str(out), "--no-report", *PARTS[part].command(name)]
    if gates_for(path_of(name), GATES.get(name)) and "--gates" not in extra:
        given += ["--gates", str(gates_for(path_of(name), GATES.get(name)))]
    gated = "--gates" in (*given, *extra)
    methods = [method for method in METHODS if method != "gate" or gated]
    given += ["--method", ",".join(methods), "--block-size", "16", *extra]
    status = seergate(["eval", *given])
    if status and not any(file.stat().st_size for file in out.glob("*/samples.jsonl")):
        return status, None
    sweep, *others = load_sweeps(out)
    if others:
        sys.exit(
            f"{out} has runs that cannot be compared: {apart([sweep, *others])}; remove some, or give another --runs"
        )
    rows = rows_of(sweep)
    for setting, row in zip(sweep.settings, rows, strict=True):
        row["method"] = row_name(setting)
        if "accuracy" not in row:
            continue
        row["accuracy_low"], row["accuracy_high"] = setting.interval
        if sweep.dense not in (None, setting) and (delta := sweep.difference(setting, sweep.dense)).n > 1:
            row |= {"minus_dense": delta.mean, "minus_dense_low": delta.low, "minus_dense_high": delta.high}
    task = {
        key: Path(value).name if key in ("file", "source") else value for key, value in sweep.config["task"].items()
    }
    described = {
        "task": task,
        "dtype": sweep.config["model"]["dtype"],
        **{key: sweep.config[key] for key in ("generation", "environment")},
    }
    return status, (described, rows)


def times(name: str, part: str, out: Path, extra: list[str]) -> tuple[int, Measurement | None]:
    """Time decode steps with `serving.py`; its exit status, and a row per method."""
    vllm = HERE.parent / ".venv-vllm/bin/python"
    without = [] if vllm.exists() else ["--ways", "hf_static", "hf_gate"]
    command = [str(vllm) if vllm.exists() else sys.executable, str(HERE / "serving.py"), "--model", path_of(name)]
    done = subprocess.run([*command, "--output", str(out), *PARTS[part].options.split(), *without, *extra])
    if done.returncode:
        return done.returncode, None
    record = json.loads(max(out.glob("*.json"), key=lambda file: file.stat().st_mtime).read_text(encoding="utf-8"))
    rows = []
    for method, ways in {"dense": ("hf_static", "vllm_dense"), "gate": ("hf_gate", "vllm_gate")}.items():
        row: dict[str, Any] = {"method": method, "budget": None if method == "dense" else record["options"]["budget"]}
        for cell in record["rows"]:
            for engine, way in zip(("transformers", "vllm"), ways, strict=True):
                if way in cell["step_median_ms"]:
                    figures = [cell["step_median_ms"][way], *cell["step_interval_ms"][way]]
                    row.setdefault(engine, {})[str(cell["batch"])] = figures
        rows.append(row)
    return 0, ({"options": record["options"]}, rows)


def merged(file: Path, name: str, part: str, described: dict[str, Any], rows: list[dict[str, Any]]) -> Path:
    """Put the rows of a part of a model into the board. Earlier rows of other methods and budgets stay if they were
    measured under the same conditions.
    """
    record = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"options": {"parts": {}}, "rows": []}
    place, key, machine = {"model": name, "part": part}, f"{name}/{part}", provenance(CPU)
    earlier = record["options"]["parts"].get(key, {})
    same = all(earlier.get(field) == described.get(field) for field in ("task", "dtype", "generation", "options"))
    measured = {(row["method"], row["budget"]) for row in rows}
    every = [{**place, **row, "commit": machine["commit"]} for row in rows]
    for row in record["rows"]:
        if any(row[field] != value for field, value in place.items()):
            every.append(row)
        elif same and (row["method"], row["budget"]) not in measured:
            every.append({"commit": earlier["machine"]["commit"], **row})
    every.sort(key=lambda row: (row["model"], list(PARTS).index(row["part"])))
    parts = record["options"]["parts"] | {key: {**described, "machine": machine}}
    return save(file.stem, {"parts": dict(sorted(parts.items()))}, every, file.parent)


def models_and_parts(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The models and parts to run. Of all models, those that are not there are left out."""
    for name in options.model or MODELS:
        if not Path(path_of(name)).is_dir():
            advice = f"python train/recipes/fetch.py {name} --out models/{name}"
            if options.model:
                sys.exit(f"the model {name} is not in models/{name}, and is no directory: {advice}")
            print(f"models/{name} is missing, its part of the board stays: {advice}")
            continue
        yield from ((name, part) for part in options.part)


def main() -> None:
    """Run what is asked, and save after each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", nargs="+", metavar="NAME", help=f"models/NAME, or a directory [{', '.join(MODELS)}]"
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="[all]")
    numbers = ", ".join(f"{part.problems} {name}" for name, part in PARTS.items() if part.problems)
    parser.add_argument("--problems", type=int, metavar="N", help=f"of each part [{numbers}]")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/results/board"), help="folder of the answers [%(default)s]"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of board.json [%(default)s]")
    options, extra = parser.parse_known_args()
    failed = []
    for model, part in models_and_parts(options):
        name = Path(model).name
        print(f"{name}: {part}", flush=True)
        if part == "times":
            status, result = times(model, part, options.runs / name / part, extra if options.part == [part] else [])
        else:
            problems = options.problems or PARTS[part].problems
            out = options.runs / name / f"{part}-{problems}"
            status, result = answers(model, part, out, ["--problems", str(problems), *extra])
        if result is not None:
            print("saved", merged(options.output / "board.json", name, part, *result))
        if status == INTERRUPTED:
            sys.exit(status)
        failed += [f"{name}/{part}"] * bool(status)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
