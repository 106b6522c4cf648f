"""Measures the distillation speed of this machine on one layer with random weights.

The time of a layer has three parts: one per token (projections, MLP, norms, the gate's branches), one per pair of a
query and a visible key (attention), and one per such pair whose query counts in the loss (the teacher's targets and
the gate's loss). Each part is measured separately with the training code; a run's time is a sum over its samples.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from seergate import ops
from seergate.distill.base_model import base_dtype, gate_config
from seergate.distill.config import TrainConfig
from seergate.distill.losses.teacher_forward import distill_step, loss_of
from seergate.gates.bank import make_gate
from seergate.gates.geometry import ModelGeometry
from seergate.gates.retention import RetentionGate
from seergate.models.families import attention_modules, decoder_of, text_config
from seergate.models.gate_bank import GateBank

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

LAYER_TOKENS = {"cpu": 4096, "cuda": 8192}
PAIR_TOKENS = {"cpu": 4096, "cuda": 16384}
"""Sequence lengths of the measurement: long enough for full speed, short enough to take seconds on a CPU. On a CPU, a
tensor above 32 MB (with glibc) costs more per element, because its memory is requested from the system each time:
about a sixth of the time of a layer of Qwen3-8B, which a measurement with 512 tokens would miss."""

ENOUGH_SECONDS = 5.0
"""Time limit of a measurement. A longer first call is the only one; its warm-up overhead is then small."""


@dataclass(frozen=True)
class Speed:
    """Time of one layer in one process, in seconds.

    Attributes:
        per_token: time per token, independent of the length.
        per_pair: attention of all heads, per pair of a query and a key.
        per_loss_pair: targets and loss of all KV heads, per pair whose query counts in the loss (without stride).
        block_size: tokens per block of the gates; only rows with a past block count.
        row_start: see `TrainConfig`.
    """

    per_token: float
    per_pair: float
    per_loss_pair: float
    block_size: int
    row_start: float

    def layer_seconds(self, samples: list[int], *, gated: bool = True) -> float:
        """Return the time of one layer for a pack of samples of these lengths."""
        counted = sum(loss_pairs(n, self.block_size, self.row_start) for n in samples) if gated else 0.0
        return self.per_token * sum(samples) + self.per_pair * sum(map(pairs, samples)) + self.per_loss_pair * counted


def pairs(length: int) -> float:
    """Return the number of pairs of a query and a visible key in a causal sequence."""
    return length * (length + 1) / 2


def loss_pairs(length: int, block_size: int, row_start: float) -> float:
    """Return the number of pairs of a query that counts in the loss and a visible key, without ``row_stride``."""
    return pairs(length) - pairs(min(length, max(int(length * row_start), block_size)))


def pack_flop(model: PreTrainedModel, bank: GateBank, config: TrainConfig, samples: list[int]) -> float:
    """Return the floating-point operations of a pack's matrix products, from shapes and sample lengths alone."""
    geometry = bank.geometry
    layers: Any = decoder_of(model).layers
    weights = sum(int(m.weight.numel()) for m in layers.modules() if isinstance(m, nn.Linear))
    chosen = getattr(text_config(model), "num_experts_per_tok", None) or 0
    experts = [p for m in layers.modules() if hasattr(m, "num_experts") for p in m.parameters(recurse=False)]
    weights += sum(chosen * p[0].numel() for p in experts if p.ndim == 3)  # all experts: [experts, in, out]
    weights += 3 * sum(p.numel() for p in bank.parameters())  # forward, recomputation, gradient
    queries = geometry.num_heads * geometry.head_dim
    gate = geometry.num_kv_heads * bank.config.gate_dim / config.block_size
    seen = sum(map(pairs, samples)) * 4 * queries * len(list(attention_modules(model)))
    counted = sum(loss_pairs(n, config.block_size, config.row_start) for n in samples) / config.row_stride
    return 2.0 * weights * sum(samples) + seen + counted * (2 * queries + 6 * gate) * len(bank)


def measure_speed(model: PreTrainedModel, config: TrainConfig, device: torch.device) -> Speed:
    """Time one layer with the shapes of a model; only the model's configuration is used, not its weights."""
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
    """Build the model with one gated layer, a vocabulary of 16 tokens and random weights."""
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
    """Return the geometry, queries, keys ``[T, heads, head dimension]`` and ``cu_seqlens`` of one random sequence. On
    a CPU, which processes KV heads one after another, it has one KV head and its group of query heads.
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
    lse = torch.zeros(q.shape[:2], device=device)  # computed by the attention; its values do not affect the time
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
    """Return the shortest time of three calls after a warm-up call; other programs can only slow a call down."""
    times: list[float] = []
    while len(times) <= 3 and sum(times) < ENOUGH_SECONDS:
        times.append(_timed(run, device))
    return min(times[1:] or times)


def _timed(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call, including the work that it launches on a GPU."""
    wait = torch.cuda.synchronize if device.type == "cuda" else int
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start
