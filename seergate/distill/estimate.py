"""Estimates a run before any weights are loaded: memory per component, whether it fits, tokens per second, time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from seergate.config import SCORERS
from seergate.distill.base_model import base_dtype, gate_config, is_gguf, with_run_rope, within_positions
from seergate.distill.config import TrainConfig, locate_model
from seergate.distill.engines import check_engine
from seergate.distill.memory import Memory, capacity, decide_sharding, estimate_memory, overhead
from seergate.distill.speed import measure_speed, pack_flop
from seergate.errors import SeergateError
from seergate.models.families import gate_geometry, text_config, why_one_sequence
from seergate.models.gate_bank import GateBank
from seergate.models.loading import base_config, skeleton
from seergate.models.names import presets
from seergate.paths import shipped
from seergate.yaml_file import read_yaml

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GB = 1e9

PEAK_TFLOPS = {"RTX 4090 (24 GB)": 165, "A100 (80 GB)": 312, "H100 SXM (80 GB)": 989}
"""GPU -> the manufacturer's peak rate of dense bf16 matrix products with float32 accumulation, in TFLOP/s."""

ASSUMED_SHARE = 0.3
"""Share of the peak rate that is assumed if no speed was measured; it is printed as an assumption."""


@dataclass(frozen=True)
class Plan:
    """Estimated memory, time and disk space of a run.

    Attributes:
        shape: one line about the model and its gates.
        memory: memory of tensors per process, in bytes.
        libraries: memory that is not available for tensors, in bytes; see `overhead`.
        capacity: memory of the device, in bytes.
        step_flop: floating-point operations of an optimizer step's matrix products, over all processes.
        step_seconds, timing: time of an optimizer step (``None`` if neither measured nor given), and its origin.
        sample_tokens: sample length that the time is estimated for.
        pack_tokens: tokens of a pack of such samples.
        why_one_sample: the reason if a pack may hold only one sample; ``None`` if it holds as many as fit.
        checkpoint: size of a checkpoint, in bytes.
    """

    config: TrainConfig
    shape: str
    device: torch.device
    processes: int
    memory: Memory
    libraries: int
    capacity: int
    step_flop: float
    step_seconds: float | None
    timing: str
    sample_tokens: int
    pack_tokens: int
    why_one_sample: str | None
    checkpoint: int

    @property
    def total(self) -> int:
        """Total memory on the device, in bytes."""
        return self.memory.total + self.libraries

    @property
    def fits(self) -> bool:
        """Whether the run fits in the memory of a process."""
        return self.total <= self.capacity

    @property
    def step_tokens(self) -> int:
        """Tokens of an optimizer step, over all processes."""
        return self.config.packs_per_step * self.pack_tokens

    @property
    def assumed_seconds(self) -> dict[str, float]:
        """GPU of `PEAK_TFLOPS` -> seconds of an optimizer step if it sustains `ASSUMED_SHARE` of its peak rate.

        Empty if a time was measured or given, or if the model does not compute in 16 bits on a GPU.
        """
        if self.step_seconds is not None or self.device.type != "cuda":
            return {}
        if base_dtype(self.config, self.device).itemsize != 2:
            return {}
        flop = self.step_flop / self.config.packs_per_step * self.config.most_packs(self.processes)
        return {name: flop / (ASSUMED_SHARE * peak * 1e12) for name, peak in PEAK_TFLOPS.items()}

    def text(self) -> str:
        """Format the plan for the console."""
        c, m, where = self.config, self.memory, self.device.type
        precision = base_dtype(c, self.device) if c.quantize == "none" else c.quantize
        share = f", 1/{self.processes}" if c.shard_base else ""
        elsewhere = "the other processes" if c.shard_base else "host memory or on disk"
        rows = {
            f"frozen model ({str(precision).removeprefix('torch.')}, without LM head){share}": m.base,
            "gates (float32)": m.gates,
            "gradients": m.gradients,
            "AdamW" + (", ZeRO share" if c.deepspeed else ""): m.moments,
            f"activations, pack of {c.max_length:,} tokens": m.activations,
            "two layers put together, or the embedding": m.gathered,
            "DeepSpeed's buffer for gradients": m.buckets,
            "LM head and file (while loading only)": m.loading,
            "Python and libraries" if where == "cpu" else "CUDA, NCCL and what fragments (assumed)": self.libraries,
            "most at once": self.total,
            f"in {elsewhere}: frozen model": m.base_elsewhere,
        }
        lines = [
            f"model: {c.model}; {self.shape}",
            f"run: {c.max_steps:,} steps of {c.packs_per_step} packs, {self.step_tokens:,} tokens a step, "
            f"{c.max_steps * self.step_tokens / 1e6:,.1f} M tokens in all; processes: {self.processes}",
            c.uneven(self.processes),
            self.why_one_sample and f"a pack holds one sample: {self.why_one_sample}",
            f"memory of each process on {where}, GB:",
            *(f"  {name:<52}{size / GB:>9.2f}" for name, size in rows.items() if size),
            self._verdict(),
            f"disk: {c.save_total_limit} checkpoints of {self.checkpoint / GB:.2f} GB",
            self._time(),
        ]
        return "\n".join(line for line in lines if line)

    def _verdict(self) -> str:
        room = f"{self.capacity / GB:.1f} GB"
        if self.fits:
            return f"fits in {room}: {(self.capacity - self.total) / GB:.1f} GB to spare"
        c = self.config
        whole = c.quantize == "none" and c.base_memory_gb is None and not is_gguf(c)
        ways = "--quantize, --base-memory-gb, more processes or " if whole else ""
        return f"does NOT fit in {room}: {ways}a smaller --max-length would need less"

    def _time(self) -> str:
        work = f"work: {self.step_flop / 1e12:,.1f} TFLOP a step in matrix products"
        samples = f"samples of {self.sample_tokens:,} tokens"
        if self.step_seconds is not None:
            return f"{work}\ntime, {self.timing}, {samples}: {self._pace(self.step_seconds)}"
        lines = [work, f"time: {self.timing}"]
        if assumed := self.assumed_seconds:
            share = f"{ASSUMED_SHARE:.0%} of its bf16 peak (small models do not)"
            lines.append(f"ASSUMED time, {samples}, if a GPU sustains {share}:")
            lines += [f"  {name}, {PEAK_TFLOPS[name]} TFLOP/s: {self._pace(time)}" for name, time in assumed.items()]
        return "\n".join(lines)

    def _pace(self, step_seconds: float) -> str:
        """Format the tokens per second and the hours of the run, given the time of a step."""
        speed = self.step_tokens / step_seconds
        hours = self.config.max_steps * step_seconds / 3600
        device_hours = hours * self.processes
        pace = f"{speed:,.0f} tokens/s, {step_seconds:,.2f} s a step, {hours:,.2f} hours"
        return f"{pace} ({device_hours:,.2f} device-hours)"


def make_plan(
    config: TrainConfig,
    *,
    processes: int = 1,
    memory_gb: float | None = None,
    device: str | None = None,
    sample_tokens: int | None = None,
    tflops: float | None = None,
    measure: bool = True,
) -> Plan:
    """Estimate a run from its configuration and the model's.

    Args:
        memory_gb: memory of the target device in GB; by default that of this machine.
        device: ``"cpu"`` or ``"cuda"``; by default ``"cuda"`` if this machine has it or ``memory_gb`` is given.
        sample_tokens: sample length that the time is estimated for; by default that of a pack, the slowest case.
        tflops: sustained rate of one device in TFLOP/s, to be used instead of a measurement.
        measure: whether to time one layer, if this machine has such a device.

    Raises:
        SeergateError: if the model or an option is not supported, or ``"cuda"`` has neither a GPU nor ``memory_gb``.
        ValueError: if a number is not positive.
    """
    numbers = {"processes": processes, "sample_tokens": sample_tokens, "memory_gb": memory_gb, "tflops": tflops}
    for name, value in numbers.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value}; it must be positive")
    if SCORERS[config.scorer].end_to_end:
        raise SeergateError(
            f"scorer is {config.scorer!r}, which trains through the whole model; there is no plan for that"
        )
    config = config.in_processes(processes)
    check_engine(config, processes)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(device or ("cuda" if memory_gb is not None else here))
    if place.type == "cuda" and here != "cuda" and memory_gb is None:
        raise SeergateError("device is 'cuda' and this machine has no CUDA device; give --memory-gb")
    shape = with_run_rope(architecture(config), config)
    config, model = within_positions(config, shape), skeleton(shape)
    gates = gate_config(config, model)
    geometry = gate_geometry(model, gates)
    with torch.device("meta"):
        bank = GateBank(gates, geometry)
    whole = int(memory_gb * GB) if memory_gb is not None else capacity(place, processes)
    libraries = overhead(place, whole)
    config = decide_sharding(model, bank, config, place, processes, whole - libraries)
    memory = estimate_memory(model, bank, config, processes=processes, device=place)
    gated, layers = len(bank), int(text_config(model).num_hidden_layers)
    tokens = min(sample_tokens or config.max_length, config.max_length)
    why_one_sample = why_one_sequence(text_config(model))
    samples = [tokens] * (1 if why_one_sample else config.max_length // tokens)
    samples += [left] if (left := config.max_length - sum(samples)) and not why_one_sample else []
    flop, most_packs = pack_flop(model, bank, config, samples), config.most_packs(processes)
    step_seconds, timing = None, "not measured, as this machine has no such device (--tflops sets what yours sustains)"
    if tflops is not None:
        step_seconds = most_packs * flop / (tflops * 1e12)
        timing = f"at {tflops:g} TFLOP/s a device"
    elif measure and place.type == here:
        speed = measure_speed(model, config, place)
        pack = gated * speed.layer_seconds(samples) + (layers - gated) * speed.layer_seconds(samples, gated=False)
        step_seconds = most_packs * pack
        threads = f", {torch.get_num_threads()} threads" if place.type == "cpu" else ""
        timing = f"from one layer measured on this machine ({place.type}{threads})"
    elif not measure:
        timing = "not measured"
    parameters = memory.gates // 4
    return Plan(
        config=config,
        shape=f"{layers} layers, {gated} with a gate, {parameters:,} parameters in the gates",
        device=place,
        processes=processes,
        memory=memory,
        libraries=libraries,
        capacity=whole,
        step_flop=config.packs_per_step * flop,
        step_seconds=step_seconds,
        timing=timing,
        sample_tokens=tokens,
        pack_tokens=sum(samples),
        why_one_sample=why_one_sample,
        checkpoint=3 * memory.gates,
    )


def architecture(config: TrainConfig) -> PretrainedConfig:
    """Return the model's configuration: from its directory, from its preset (without the Hub), or from the Hub."""
    from transformers import AutoConfig

    located = locate_model(config)
    for name, path in presets().items():
        shape = shipped("configs") / "architectures" / f"{name}.json"
        named = str(read_yaml(path).get("model", "")).lower()
        if shape.is_file() and not Path(located.model).is_dir() and named == config.model.lower():
            return AutoConfig.for_model(**json.loads(shape.read_text(encoding="utf-8")))
    return base_config(located.model, revision=config.revision)
