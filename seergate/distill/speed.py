"""Measured distillation speed of this machine, on one layer with random weights.

The cost of a layer has three parts: one per token (projections, MLP, norms, the gate's branches), one per pair of a
query and a key it sees (attention), and one per such pair of the rows that count in the loss (the teacher's targets
and the gate's loss). Each is measured by itself, on the code that trains; a run's time is then a sum over its samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from seergate import ops
from seergate.distill.base_model import base_dtype, gate_config
from seergate.distill.config import TrainConfig
from seergate.gates.bank import make_gate
from seergate.gates.retention import RetentionGate
from seergate.geometry import ModelGeometry
from seergate.hf.bank import GateBank
from seergate.hf.break_even import timed
from seergate.hf.teacher_forward import distill_step, loss_of
from seergate.models.families import attention_modules, decoder_of, text_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

LAYER_TOKENS = {"cpu": 4096, "cuda": 8192}
PAIR_TOKENS = {"cpu": 4096, "cuda": 16384}
"""Lengths to measure at: long enough for full speed, short enough for a processor to be done in seconds. There a large
tensor (above 32 MB with glibc) costs more per element than a small one, as its memory comes from the system anew each
time: about a sixth of the time of a layer of Qwen3-8B, which 512 tokens would not show."""

ENOUGH_SECONDS = 5.0
"""A call that takes longer is measured once: the overhead of a first call is small then."""


@dataclass(frozen=True)
class Speed:
    """Seconds of one layer on one process.

    Attributes:
        per_token: cost per token, whatever the length.
        per_pair: attention of all heads, per query and key.
        per_loss_pair: targets and loss of all KV heads, per key and query that would count in the loss without a
            stride.
        block_size: tokens per block of the gates; a row needs one past block.
    """

    per_token: float
    per_pair: float
    per_loss_pair: float
    block_size: int
    row_start: float

    def layer_seconds(self, samples: list[int], *, gated: bool = True) -> float:
        """Time of one layer for a pack of samples of these lengths."""
        counted = sum(loss_pairs(n, self.block_size, self.row_start) for n in samples) if gated else 0.0
        return self.per_token * sum(samples) + self.per_pair * sum(map(pairs, samples)) + self.per_loss_pair * counted


def pairs(length: int) -> float:
    """Queries and keys of a causal sequence."""
    return length * (length + 1) / 2


def loss_pairs(length: int, block_size: int, row_start: float) -> float:
    """Queries and keys of the rows that count in the loss."""
    return pairs(length) - pairs(min(length, max(int(length * row_start), block_size)))


def pack_flop(model: PreTrainedModel, bank: GateBank, config: TrainConfig, samples: list[int]) -> float:
    """Floating-point operations of a pack's matrix products, from shapes and the lengths of its samples alone."""
    geometry = bank.geometry
    layers: Any = decoder_of(model).layers
    weights = sum(int(m.weight.numel()) for m in layers.modules() if isinstance(m, nn.Linear))
    chosen = getattr(text_config(model), "num_experts_per_tok", None) or 0
    experts = [p for m in layers.modules() if hasattr(m, "num_experts") for p in m.parameters(recurse=False)]
    weights += sum(chosen * p[0].numel() for p in experts if p.ndim == 3)  # one tensor for all: [experts, in, out]
    weights += 3 * sum(p.numel() for p in bank.parameters())  # forward, again for its gradient, and the gradient
    queries = geometry.num_heads * geometry.head_dim
    gate = geometry.num_kv_heads * bank.config.gate_dim / config.block_size
    seen = sum(map(pairs, samples)) * 4 * queries * len(list(attention_modules(model)))
    counted = sum(loss_pairs(n, config.block_size, config.row_start) for n in samples) / config.row_stride
    return 2.0 * weights * sum(samples) + seen + counted * (2 * queries + 6 * gate) * len(bank)


def measure_speed(model: PreTrainedModel, config: TrainConfig, device: torch.device) -> Speed:
    """Time one layer of a model's geometry; only the model's configuration is read."""
    with torch.random.fork_rng(devices=[]):
        layer = _one_layer(model.config, base_dtype(config, device), device)
        bank = GateBank.for_model(layer, gate_config(config, layer)).to(device)
    length = min(LAYER_TOKENS.get(device.type, 8192), config.max_length)
    ids = torch.randint(0, 16, (1, length), device=device)

    def step() -> None:
        distill_step(bank, layer, ids, row_start=config.row_start, row_stride=config.row_stride).loss.backward()

    whole = _seconds(step, device)
    per_pair = _attention(bank, config, device)
    per_loss = _gate_loss(bank, config, device)
    counted = loss_pairs(length, config.block_size, config.row_start)
    rest = max(0.0, whole - per_pair * pairs(length) - per_loss * counted)
    return Speed(rest / length, per_pair, per_loss, config.block_size, config.row_start)


def _one_layer(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model cut down to one gated layer and a few words."""
    from transformers import AutoModelForCausalLM

    cut: Any = copy.deepcopy(config.get_text_config())
    cut.num_hidden_layers, cut.vocab_size = 1, 16
    cut.pad_token_id = cut.bos_token_id = cut.eos_token_id = None
    if getattr(cut, "layer_types", None):
        cut.layer_types = ["full_attention"]
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(cut, dtype=dtype)
    return model.eval().requires_grad_(False)


def _sample(bank: GateBank, config: TrainConfig, device: torch.device) -> tuple[ModelGeometry, Tensor, Tensor, Tensor]:
    """The geometry, queries, keys ``[T, heads, head dimension]`` and ``cu_seqlens`` of one random sequence. On a
    processor, which takes the groups of heads one after the other, it has only one.
    """
    length, heads = min(PAIR_TOKENS.get(device.type, 16384), config.max_length), bank.geometry
    if device.type == "cpu":
        heads = replace(heads, num_heads=heads.num_heads // heads.num_kv_heads, num_kv_heads=1)
    q, k = (
        torch.randn(length, n, heads.head_dim, dtype=base_dtype(config, device), device=device)
        for n in (heads.num_heads, heads.num_kv_heads)
    )
    return heads, q, k, torch.tensor([0, length], dtype=torch.int32)


def _attention(bank: GateBank, config: TrainConfig, device: torch.device) -> float:
    heads, q, k, cu_seqlens = _sample(bank, config, device)
    seconds = _seconds(partial(ops.packed_attention, q, k, k, cu_seqlens), device)
    return seconds * (bank.geometry.num_kv_heads // heads.num_kv_heads) / pairs(len(q))


def _gate_loss(bank: GateBank, config: TrainConfig, device: torch.device) -> float:
    (heads, q, k, cu_seqlens), size = _sample(bank, config, device), config.block_size
    budgets = tuple(budget for budget in config.recall_budgets if budget >= size)
    lse = torch.zeros(q.shape[:2], device=device)  # comes with the attention's output; its values cost nothing
    rules: dict[str, Any] = {"row_start": config.row_start, "recall_budgets": budgets, "lse": lse}
    groups = bank.geometry.num_kv_heads // heads.num_kv_heads
    share = groups / loss_pairs(len(q), size, config.row_start)
    gate = make_gate(bank.config, heads).to(device)
    if isinstance(gate, RetentionGate):
        scores = torch.rand(k.shape[:2], device=device)
        return _seconds(lambda: ops.retention_kl(q, k, scores, cu_seqlens, size, **rules), device) * share
    positions = torch.arange(len(q), device=device)
    with torch.no_grad():
        qg = gate.queries(q.transpose(0, 1)[None], positions)[0].transpose(0, 1)
        kg = gate.keys(gate.pool(k.transpose(0, 1)[None]), positions[:: gate.entry_tokens])[0].transpose(0, 1)
    qg.requires_grad_(), kg.requires_grad_()
    rules |= {"sink_blocks": config.sink_blocks, "row_stride": config.row_stride}
    loss_op = loss_of(gate, config.target, config.target_budget)

    def run() -> None:
        loss, _ = loss_op(q, k, qg, kg, cu_seqlens, size, **rules)
        torch.autograd.grad(loss, (qg, kg))

    return _seconds(run, device) * share


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Least time of three calls, after an uncounted first one: another program can only make it slower."""
    times: list[float] = []
    while len(times) <= 3 and sum(times) < ENOUGH_SECONDS:
        times.append(timed(run, device))
    return min(times[1:] or times)
