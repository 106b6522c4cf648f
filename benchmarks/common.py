"""Code shared by the benchmarks: options, timing, errors, and the record of machine and versions."""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seergate.eval.environment import processor, version_of

RESULTS = Path(__file__).parent / "results"
CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Dtype -> relative error below which a result counts as right."""


def arguments(text: str | None) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark; ``text`` is the module's docstring."""
    parser = argparse.ArgumentParser(description=(text or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the table [%(default)s]")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse a command line made by `arguments`, and set PyTorch's number of threads."""
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    return options


def described(options: argparse.Namespace, *without: str) -> dict[str, Any]:
    """The options for a file of results: all but ``output`` and the names in ``without``, which change no number."""
    return {name: value for name, value in vars(options).items() if name not in ("output", *without)}


def shown(row: Mapping[str, Any]) -> str:
    """A row of results in one line."""
    return "  ".join(f"{name} {value}" for name, value in row.items())


def relative(got: Tensor, want: Tensor) -> float:
    """Relative error: norm of the difference over norm of ``want``."""
    want = want.detach().double()
    return float((got.detach().double() - want).norm() / want.norm().clamp(min=1e-30))


def timed(
    run: Callable[[], Any], repeats: int, device: torch.device, seconds: float = math.inf, warm: bool = False
) -> dict[str, float]:
    """Milliseconds per call, ``{"min": ..., "median": ...}``, after one warm-up call unless it is ``warm`` already.

    No further call is made once the counted calls have taken ``seconds``.
    """

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    if not warm:
        run()
    wait()
    times: list[float] = []
    while len(times) < repeats and (not times or sum(times) < 1e3 * seconds):
        start = time.perf_counter()
        run()
        wait()
        times.append((time.perf_counter() - start) * 1e3)
    return _least_and_median(times)


def _least_and_median(times: Sequence[float]) -> dict[str, float]:
    return {"min": min(times), "median": statistics.median(times)}


def timed_in_turns(
    runs: Mapping[str, Callable[[], Any]], rounds: int, device: torch.device
) -> dict[str, dict[str, float]]:
    """Milliseconds per call of each, ``{"min": ..., "median": ...}``. The calls take turns, so that other load on the
    machine slows all of them alike; none is warmed up here.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(timed(run, 1, device, warm=True)["min"])
    return {name: _least_and_median(each) for name, each in times.items()}


def timed_rotated(
    runs: Sequence[Callable[[], Any]], repeats: int, device: torch.device, seconds: float = math.inf
) -> dict[str, float]:
    """Milliseconds per call of calls that differ only in the memory that they read, so that all of them miss caches.

    On a GPU, all calls are captured in one CUDA graph and replayed, so that Python's time does not count. On a CPU, no
    further round is made once the counted rounds have taken ``seconds``.
    """

    def all_runs() -> None:
        for run in runs:
            run()

    if device.type != "cuda":
        times = timed(all_runs, repeats, device, seconds)
    else:
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            all_runs()  # warm-up, which also compiles
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            all_runs()
        graph.replay()
        milliseconds = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            milliseconds.append(start.elapsed_time(end))
        times = _least_and_median(milliseconds)
    return {name: ms / len(runs) for name, ms in times.items()}


def read_bandwidth(device: torch.device, repeats: int) -> float:
    """Bytes per second of summing an array larger than any cache: the roofline of a kernel that mostly reads."""
    numbers = torch.ones((4 if device.type == "cuda" else 1) << 28, device=device)  # 4 GiB, or 1 GiB
    out = torch.empty((), device=device)
    milliseconds = timed_rotated([lambda: torch.sum(numbers, dim=0, out=out)], repeats, device)["min"]
    return numbers.numel() * numbers.element_size() / (milliseconds * 1e-3)


def random_model(vocabulary: int = 1024, **shape: Any) -> Any:
    """A Qwen3 model with random weights; ``shape`` has ``hidden_size``, ``layers``, ``heads``, ``kv_heads``,
    ``head_dim``, and other fields of the configuration.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    names = {"layers": "num_hidden_layers", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads"}
    given = {"intermediate_size": 3 * shape["hidden_size"]} | {names.get(key, key): x for key, x in shape.items()}
    config = AutoConfig.for_model(
        "qwen3", vocab_size=vocabulary, max_position_embeddings=1 << 18, eos_token_id=None, pad_token_id=0, **given
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32).eval()
    model.generation_config.do_sample = False
    return model.requires_grad_(False)


def peak_bytes(run: Callable[[], Any], device: torch.device = CPU) -> int:
    """Peak bytes allocated during ``run()``, minus those allocated before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    now = top = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        top = max(top, now)
    return top


def resident(reset_peak: bool = False) -> int:
    """Bytes of this process in memory, mapped files included, or of GPU memory if there is a GPU: the current bytes,
    after resetting the peak, if ``reset_peak``; otherwise the peak since then.
    """
    if torch.cuda.is_available():
        if reset_peak:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() if reset_peak else torch.cuda.max_memory_allocated()
    if not Path("/proc/self/clear_refs").exists():
        return 0
    if reset_peak:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return in_memory("VmRSS" if reset_peak else "VmHWM")


def in_memory(field: str) -> int:
    """Resident bytes of this process as Linux counts them: ``"VmRSS"`` is the current value, ``"VmHWM"`` the peak."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def exact_decode(q: Tensor, k: Tensor, v: Tensor, indices: Tensor | None, lengths: Tensor, block: int) -> Tensor:
    """Attention of one token per row to the selected blocks, or to all tokens, in float64, one row at a time."""
    rows = []
    for b in range(len(q)):
        token = torch.arange(k.shape[2], device=k.device)
        read = (token < lengths[b]).expand(k.shape[1], -1)
        if indices is not None:
            chosen = torch.zeros(k.shape[1], k.shape[2] // block + 2, dtype=torch.bool, device=k.device)
            chosen.scatter_(1, indices[b].long() % chosen.shape[1], True)  # the padding index falls on the last entry
            chosen[:, -1] = False
            read = read & chosen.gather(1, (token // block).expand(k.shape[1], -1))
        k64, v64 = (x[b].double().masked_fill(~read[..., None], 0) for x in (k, v))
        scores = q[b].double().unflatten(0, (k.shape[1], -1)) @ k64.transpose(1, 2) / math.sqrt(q.shape[-1])
        rows.append((scores.masked_fill(~read[:, None], -math.inf).softmax(-1) @ v64).flatten(0, 1))
    return torch.stack(rows)


def commit() -> str:
    """The current commit, with ``-dirty`` if a file other than results and documents has changes."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=RESULTS, capture_output=True, text=True, check=False)

    name = git("rev-parse", "--short", "HEAD").stdout.strip()
    changed = git(
        "diff", "--quiet", "HEAD", "--", ":/", ":!.", ":(top,exclude)docs", ":(top,exclude)dvc.lock"
    ).returncode
    return f"{name}-dirty" if name and changed else name or "unknown"


def provenance(device: torch.device) -> dict[str, str | int | None]:
    """Machine, versions and commit."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version_of("transformers"),
        "triton": version_of("triton"),
        "commit": commit(),
    }


def save(
    name: str, options: dict[str, Any], rows: list[dict[str, Any]], folder: Path, device: torch.device = CPU
) -> Path:
    """Write ``<folder>/<name>.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    record = {"machine": provenance(device), "options": options, "rows": rows}
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return path
