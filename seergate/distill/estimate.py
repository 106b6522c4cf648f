"""Estimates a run before any weights are loaded: memory per component, whether it fits, and the work of a step."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from seergate.config import SCORERS
from seergate.distill.base_model import base_dtype, own_format, with_run_rope, within_positions
from seergate.distill.config import TrainConfig, locate_model
from seergate.distill.engines import check_engine
from seergate.distill.memory import Memory, capacity, decide_sharding, estimate_memory, overhead
from seergate.errors import SeergateError
from seergate.models.families import (
    attention_modules,
    decoder_of,
    gate_geometry,
    head_dim_of,
    text_config,
    why_one_sequence,
)
from seergate.models.gate_bank import GateBank
from seergate.models.loading import base_config, skeleton
from seergate.models.names import presets
from seergate.paths import gguf_file, shipped
from seergate.yaml_file import read_yaml

GB = 1e9


@dataclass(frozen=True)
class Plan:
    """Estimated memory, work and disk space of a run.

    Attributes:
        shape: one line about the model and its gates.
        precision: dtype or format of the frozen model's weights.
        memory: memory of tensors per process, in bytes.
        libraries: memory that is not available for tensors, in bytes; see `overhead`.
        capacity: memory of the device, in bytes.
        step_flop: floating-point operations of an optimizer step's matrix products, over all processes, if each sample
            fills a pack, which takes longest.
        tflops: sustained rate of one device in TFLOP/s, if given.
        why_one_sample: the reason if a pack may hold only one sample; ``None`` if it holds as many as fit.
        checkpoint: size of a checkpoint, in bytes.
    """

    config: TrainConfig
    shape: str
    precision: str
    device: torch.device
    processes: int
    memory: Memory
    libraries: int
    capacity: int
    step_flop: float
    tflops: float | None
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
        return self.config.packs_per_step * self.config.max_length

    @property
    def step_seconds(self) -> float | None:
        """Seconds of an optimizer step at the rate `tflops`; ``None`` without it."""
        if self.tflops is None:
            return None
        flop = self.step_flop / self.config.packs_per_step * self.config.most_packs(self.processes)
        return flop / (self.tflops * 1e12)

    def text(self) -> str:
        """Format the plan for the console."""
        c, m, where = self.config, self.memory, self.device.type
        share = f", 1/{self.processes}" if c.shard_base else ""
        elsewhere = "the other processes" if c.shard_base else "host memory or on disk"
        rows = {
            f"frozen model ({self.precision}, without LM head){share}": m.base,
            "gates (float32)": m.gates,
            "gradients": m.gradients,
            "AdamW" + (", ZeRO share" if c.deepspeed else ""): m.moments,
            f"activations, pack of {c.max_length:,} tokens": m.activations,
            "two layers put together, or the embedding": m.gathered,
            "DeepSpeed's buffer for gradients": m.buckets,
            "LM head and file (while loading only)": m.loading,
            "Python and libraries" if where == "cpu" else "CUDA, NCCL and fragmentation (assumed)": self.libraries,
            "most at once": self.total,
            f"in {elsewhere}: frozen model": m.base_elsewhere,
        }
        uncounted = c.scorer != "attn_gate" or c.q_pooling == "none" or c.target != "max"
        lines = [
            f"model: {c.model}; {self.shape}",
            f"run: {c.max_steps:,} steps, packs per step: {c.packs_per_step}, {self.step_tokens:,} tokens a step, "
            f"{c.max_steps * self.step_tokens / 1e6:,.1f} M tokens in all; processes: {self.processes}",
            c.uneven(self.processes),
            self.why_one_sample and f"a pack holds one sample: {self.why_one_sample}",
            f"memory of each process on {where}, GB:",
            *(f"  {name:<52}{size / GB:>9.2f}" for name, size in rows.items() if size),
            uncounted and "  as counted for attn_gate, pooled queries and max targets; these gates need more",
            self._verdict(),
            f"disk: {c.save_total_limit} checkpoints of {self.checkpoint / GB:.2f} GB",
            f"work: {self.step_flop / 1e12:,.1f} TFLOP a step in matrix products, if each sample fills a pack",
            self._time(),
        ]
        return "\n".join(line for line in lines if line)

    def _verdict(self) -> str:
        room = f"{self.capacity / GB:.1f} GB"
        if self.fits:
            return f"fits in {room}: {(self.capacity - self.total) / GB:.1f} GB to spare"
        c = self.config
        if self.libraries >= self.capacity:
            return f"does NOT fit in {room}: what is not for tensors alone needs {self.libraries / GB:.1f} GB"
        whole = self.precision.endswith(("float16", "float32")) and not gguf_file(c.model)
        if c.base_memory_gb is not None:
            ways = "a smaller --base-memory-gb or "
        elif self.precision.endswith("mxfp4"):  # may be divided
            ways = "more processes or "
        else:
            ways = "--quantize, --base-memory-gb, more processes or " if whole else ""
        return f"does NOT fit in {room}: {ways}a smaller --max-length would need less"

    def _time(self) -> str:
        if (seconds := self.step_seconds) is None:
            return "time: `seergate plan --tflops` computes it from the rate that a device sustains"
        hours = self.config.max_steps * seconds / 3600
        return (
            f"time at {self.tflops:,.3g} TFLOP/s a device: {self.step_tokens / seconds:,.0f} tokens/s, "
            f"{seconds:,.2f} s a step, {hours:,.2f} hours ({self.processes * hours:,.2f} device-hours)"
        )


def make_plan(
    config: TrainConfig,
    *,
    processes: int = 1,
    memory_gb: float | None = None,
    device: str | None = None,
    tflops: float | None = None,
) -> Plan:
    """Estimate a run from its configuration and the model's.

    Args:
        memory_gb: memory of the target device in GB; by default that of this machine.
        device: ``"cpu"`` or ``"cuda"``; by default ``"cuda"`` if this machine has it or ``memory_gb`` is given.
        tflops: sustained rate of one device in TFLOP/s, from which the time of a step is computed.

    Raises:
        SeergateError: if the model or an option is not supported, or ``"cuda"`` has neither a GPU nor ``memory_gb``.
        ValueError: if a number is not positive.
    """
    numbers = {"processes": processes, "memory_gb": memory_gb, "tflops": tflops}
    for name, value in numbers.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}; it must be positive and finite")
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
    gates = config.gates(head_dim_of(model))
    geometry = gate_geometry(model, gates)
    readers = len(geometry.layers)
    if absent := set(config.anchors) - set(geometry.layers):
        raise SeergateError(f"anchors has {sorted(absent)}; it must name some of {list(geometry.layers)}")
    if config.anchors:
        geometry = replace(geometry, layers=tuple(config.anchors))
    with torch.device("meta"):
        bank = GateBank(gates, geometry)
    whole = int(memory_gb * GB) if memory_gb is not None else capacity(place, processes)
    libraries = overhead(place, whole)
    config = decide_sharding(model, bank, config, place, processes, whole - libraries)
    memory = estimate_memory(model, bank, config, processes=processes, device=place)
    gated, layers = len(bank), int(text_config(model).num_hidden_layers)
    parameters = memory.gates // 4
    precision = str(base_dtype(config, place)).removeprefix("torch.")
    if own := own_format(shape):
        precision = own[0] if own[1] else f"counted as {precision}, not {own[0]}"
    return Plan(
        config=config,
        shape=f"{layers} layers, {gated} with a gate, {parameters:,} parameters in the gates",
        precision=precision if config.quantize == "none" else config.quantize,
        device=place,
        processes=processes,
        memory=memory,
        libraries=libraries,
        capacity=whole,
        step_flop=config.packs_per_step * pack_flop(model, bank, config, config.max_length, readers),
        tflops=tflops,
        why_one_sample=why_one_sequence(text_config(model)),
        checkpoint=3 * memory.gates,
    )


def pairs(length: int) -> float:
    """Return the number of pairs of a query and a visible key in a causal sequence."""
    return length * (length + 1) / 2


def loss_pairs(length: int, config: TrainConfig) -> float:
    """Return the number of pairs of a query that counts in the loss and a visible key."""
    first = max(int(length * config.row_start), config.block_size)
    return (pairs(length) - pairs(min(length, first))) / config.row_stride


def pack_flop(model: PreTrainedModel, bank: GateBank, config: TrainConfig, length: int, readers: int) -> float:
    """Return the floating-point operations of the matrix products of a pack with one sample, from shapes alone;
    ``readers`` is the number of layers whose attention is compared with that of a gate.
    """
    geometry = bank.geometry
    layers: Any = decoder_of(model).layers
    weights = sum(int(m.weight.numel()) for m in layers.modules() if isinstance(m, nn.Linear))
    chosen = getattr(text_config(model), "num_experts_per_tok", None) or 0
    experts = [p for m in layers.modules() if hasattr(m, "num_experts") for p in m.parameters(recurse=False)]
    weights += sum(chosen * p[0].numel() for p in experts if p.ndim == 3)  # all experts: [experts, in, out]
    weights += 3 * bank.num_parameters  # forward, recomputation, gradient
    queries = geometry.num_heads * geometry.head_dim
    gate = geometry.num_kv_heads * bank.config.gate_dim / config.block_size
    seen = pairs(length) * 4 * queries * len(list(attention_modules(model)))
    return 2.0 * weights * length + seen + loss_pairs(length, config) * (2 * queries + 6 * gate) * readers


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
