"""Engines, which take the optimizer steps: PyTorch in one process or several, or DeepSpeed ZeRO.

All engines compute the same update: the gradient is the mean over the packs of the global batch, clipped by its global
norm, and AdamW runs in float32. An engine receives losses and never sees the frozen model. The state of every engine
consists of the same three tensors per parameter, so that a run can resume with another engine or another number of
processes.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import socket
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from seergate.checks import is_number
from seergate.distill.config import TrainConfig
from seergate.distill.distributed import DistributedState, expect_steps
from seergate.distill.losses.distill_loss import StoredGradients
from seergate.errors import SeergateError, first_line, how_to_install
from seergate.paths import resolve_file

if TYPE_CHECKING:
    from seergate.models.gate_bank import GateBank

BETAS, EPS = (0.9, 0.999), 1e-8
MOMENTS = ("exp_avg", "exp_avg_sq")


class Engine(ABC):
    """Interface of the training loop to an engine. Its ``name`` is printed before the first step."""

    name: str

    @abstractmethod
    def accumulate(self, loss: Tensor) -> None:
        """Add the gradient of a pack's loss."""

    @abstractmethod
    def skip(self) -> None:
        """Take part in the last pack of a step without a loss, because other processes have one pack more."""

    @abstractmethod
    def update(self, lr: float) -> float:
        """Take an optimizer step with learning rate ``lr``; returns the gradient's norm before clipping."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return the gates and AdamW's moments as float32 tensors on the CPU, not sharded: ``gates.<parameter>``,
        ``exp_avg.<parameter>``, ``exp_avg_sq.<parameter>``. All processes must call it; each gets the whole state.
        """

    @abstractmethod
    def load(self, state: dict[str, Tensor], step: int) -> None:
        """Restore a `state` that was saved after ``step`` optimizer steps."""


def check_engine(config: TrainConfig, world_size: int) -> None:
    """Raise `SeergateError` early if `make_engine` would fail for the options or the installed packages."""
    if config.shard_base and world_size == 1:
        raise SeergateError("shard_base is true; it needs several processes, as torchrun or deepspeed start them")
    if config.deepspeed:
        if importlib.util.find_spec("deepspeed") is None:
            raise SeergateError(f"DeepSpeed is not installed; {how_to_install('train')}, or use torchrun")
        deepspeed_config(config, world_size)


def make_engine(bank: GateBank, config: TrainConfig, world: DistributedState) -> Engine:
    """Create the engine of a run; `check_engine` must have accepted the options."""
    return (DeepSpeedEngine if config.deepspeed else PlainEngine)(bank, config, world)


def make_optimizer(parameters: list[nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW with the paper's betas and epsilon and the run's learning rate and weight decay."""
    return torch.optim.AdamW(
        parameters, lr=config.learning_rate, betas=BETAS, eps=EPS, weight_decay=config.weight_decay
    )


class PlainEngine(Engine):
    """Plain PyTorch. With several processes, the gradients are summed by one all-reduce per step."""

    name = "PyTorch"

    def __init__(self, bank: GateBank, config: TrainConfig, world: DistributedState) -> None:
        self._config, self._world = config, world
        self._named = dict(bank.named_parameters())
        self._optimizer = make_optimizer(list(self._named.values()), config)

    def accumulate(self, loss: Tensor) -> None:
        (loss / self._config.packs_per_step).backward()

    def skip(self) -> None:
        pass  # processes communicate only in `update`

    def update(self, lr: float) -> float:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._named.values()]
        if self._world.size > 1:
            flat = self._world.sum(torch.cat([g.reshape(-1) for g in gradients]))
            pieces = flat.split([g.numel() for g in gradients])
            gradients = [piece.view_as(g) for piece, g in zip(pieces, gradients, strict=True)]
        for parameter, gradient in zip(self._named.values(), gradients, strict=True):
            parameter.grad = gradient
        norm = nn.utils.clip_grad_norm_(self._named.values(), self._config.max_grad_norm or float("inf"))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def state(self) -> dict[str, Tensor]:
        slots = self._optimizer.state
        return _portable(
            {f"gates.{name}": p for name, p in self._named.items()}
            | {f"{m}.{name}": slots[p].get(m, torch.zeros_like(p)) for m in MOMENTS for name, p in self._named.items()}
        )

    def load(self, state: dict[str, Tensor], step: int) -> None:
        for name, parameter in self._named.items():
            parameter.data.copy_(state[f"gates.{name}"])
            self._optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                **{m: state[f"{m}.{name}"].to(parameter.device, copy=True) for m in MOMENTS},
            }


class _GateModule(nn.Module):
    """The gates as a model for DeepSpeed. Its forward returns a loss that was computed before."""

    def __init__(self, bank: GateBank) -> None:
        super().__init__()
        self.bank = bank

    def forward(self, loss: Tensor) -> Tensor:
        return loss


class DeepSpeedEngine(Engine):
    """DeepSpeed ZeRO stage 1 or 2 over the gates."""

    name = "DeepSpeed ZeRO"

    def __init__(self, bank: GateBank, config: TrainConfig, world: DistributedState) -> None:
        import deepspeed

        self._named = dict(bank.named_parameters())
        values = deepspeed_config(config, world.size)
        optimizer = make_optimizer(list(self._named.values()), config)
        try:
            self._engine, *_ = deepspeed.initialize(model=_GateModule(bank), optimizer=optimizer, config=values)
        except AssertionError as error:
            raise SeergateError(f"DeepSpeed refuses {config.deepspeed}: {first_line(error)}") from error
        expect_steps(self._engine.data_parallel_group)  # DeepSpeed creates the group with its own timeout
        self._micro_batches = values["gradient_accumulation_steps"]
        # DeepSpeed divides by the number of all micro-batches, but some of them may have no pack.
        self._scale = values["train_batch_size"] / config.packs_per_step
        self._pending = 0

    def accumulate(self, loss: Tensor) -> None:
        self._engine.backward(self._engine(loss) * self._scale)  # `backward` divides by the number of micro-batches
        self._pending += 1
        if self._pending < self._micro_batches:
            self._engine.step()  # only counts the micro-batch; `update` calls it for the last one

    def skip(self) -> None:
        # DeepSpeed reduces gradients over all processes at each micro-batch; this process contributes zeros. They come
        # from the same autograd function as a pack's, as DeepSpeed reduces them in the order of backward.
        parameters = [p for p in self._named.values() if p.requires_grad]
        zeros = [torch.zeros_like(p) for p in parameters]
        self.accumulate(StoredGradients.apply(zeros[0].new_zeros(()), len(zeros), *zeros, *parameters))

    def update(self, lr: float) -> float:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()
        self._pending = 0
        return float(self._engine.get_global_grad_norm())

    def state(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        named = self._named.items()
        return _portable(
            {f"gates.{name}": safe_get_full_fp32_param(p) for name, p in named}
            | {f"{m}.{name}": safe_get_full_optimizer_state(p, m) for m in MOMENTS for name, p in named}
        )

    def load(self, state: dict[str, Tensor], step: int) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        # AdamW and DeepSpeed create their state in the first step; a step with learning rate 0 changes no gates.
        for _ in range(self._micro_batches):
            self.skip()
        self.update(lr=0.0)
        for moments in self._engine.optimizer.optimizer.state.values():
            moments["step"].fill_(float(step))
        for name, parameter in self._named.items():
            parameter.data.copy_(state[f"gates.{name}"])
            safe_set_full_fp32_param(parameter, state[f"gates.{name}"].to(parameter.device))
            for m in MOMENTS:
                safe_set_full_optimizer_state(parameter, state[f"{m}.{name}"].to(parameter.device), m)


REDUCE_BUCKET_SIZE = 500_000_000
"""DeepSpeed's default, in elements."""


def deepspeed_config(config: TrainConfig, world_size: int) -> dict[str, Any]:
    """Read DeepSpeed's configuration file and add the run's values; raise `SeergateError` if they contradict it."""
    assert config.deepspeed is not None
    try:
        values: dict[str, Any] = json.loads(resolve_file(config.deepspeed).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SeergateError(f"deepspeed is {config.deepspeed!r}; it must be a JSON file that can be read") from error
    if not isinstance(values, dict):
        raise SeergateError(f"deepspeed is {config.deepspeed!r}; the file must hold a JSON object")
    values = _without_auto(values)
    zero = values.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise SeergateError(f"{config.deepspeed} sets zero_optimization to {zero!r}; it must be a JSON object")
    stage, bucket = zero.get("stage", 0), zero.setdefault("reduce_bucket_size", REDUCE_BUCKET_SIZE)
    if stage not in (1, 2):
        raise SeergateError(f"{config.deepspeed} asks for ZeRO stage {stage}; the gates train with stage 1 or 2")
    zero["round_robin_gradients"] = False  # `state` and `load` need the parameters in their own order
    if not is_number(bucket) or not 0 <= bucket < math.inf:
        raise SeergateError(f"{config.deepspeed} sets reduce_bucket_size to {bucket!r}; it must be a number or 'auto'")
    for name in ("bf16", "bfloat16", "fp16"):  # the second is DeepSpeed's older name of the first
        section = values.pop(name, None)
        if isinstance(section, dict) and section.get("enabled") is True:
            raise SeergateError(
                f"{config.deepspeed} switches {name} on; the gates train in float32, and the frozen model's precision "
                "is dtype"
            )
    for name in ("optimizer", "scheduler"):
        if name in values:
            raise SeergateError(
                f"{config.deepspeed} sets the {name}; that is the run's (learning_rate, min_lr, warmup_steps, ...)"
            )
    most = config.most_packs(world_size)
    implied = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": most,
        "train_batch_size": most * world_size,
        "gradient_clipping": config.max_grad_norm,
        "zero_force_ds_cpu_optimizer": False,  # with an offloaded optimizer, DeepSpeed would refuse the run's AdamW
    }
    for name, value in implied.items():
        if values.setdefault(name, value) != value:
            raise SeergateError(
                f"{config.deepspeed} sets {name} to {values[name]}; this run needs {value} (or 'auto')"
            )
        values[name] = value
    # DeepSpeed's throughput timer, which is not used here, would synchronise with the device at each pack.
    values.setdefault("timers", {}).setdefault("throughput", {}).setdefault("enabled", False)
    return values


def check_zero(config: TrainConfig, world_size: int) -> None:
    """Raise `SeergateError` early if DeepSpeed does not accept the file's ``zero_optimization``."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    try:
        DeepSpeedZeroConfig(**deepspeed_config(config, world_size)["zero_optimization"])
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise SeergateError(f"DeepSpeed refuses zero_optimization of {config.deepspeed}: {reason}") from error


def bucket_bytes(config: TrainConfig, processes: int) -> int:
    """Return the bytes of DeepSpeed's buffer for reducing gradients; 0 without DeepSpeed."""
    if not config.deepspeed:
        return 0
    zero = deepspeed_config(config, processes)["zero_optimization"]
    return 4 * int(zero["reduce_bucket_size"]) if zero.get("contiguous_gradients", True) else 0


def _without_auto(values: dict[str, Any]) -> dict[str, Any]:
    """Leave out the values ``"auto"``, which Hugging Face's trainers replace; DeepSpeed's defaults apply."""
    return {
        name: _without_auto(value) if isinstance(value, dict) else value
        for name, value in values.items()
        if value != "auto"
    }


def prepare_deepspeed() -> None:
    """Set the environment variables that DeepSpeed reads: the accelerator, which it assumes to be CUDA, and the rank
    and address of a process that was started without a launcher.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    if os.environ["WORLD_SIZE"] == "1" and "MASTER_PORT" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])


def _portable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().to("cpu", torch.float32, copy=True) for name, x in tensors.items()}
