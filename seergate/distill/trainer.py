"""The training loop: frozen model in, adapter directory out.

What a run leaves in its output directory:

* ``gate_config.json``, ``gate_model.safetensors``, ``README.md``: the finished adapter
* ``best/``: the adapter with the lowest KL on the held-out packs
* ``train_config.yaml``, ``data.json``: what was asked for, and what the data turned out to be
* ``checkpoints/step-00000100/``: to continue from
* ``tensorboard/``
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from seergate.adapter import save_adapter
from seergate.bank import GateBank
from seergate.config import GateConfig
from seergate.distill.callbacks import Callback, Console, EvalLog, StepLog, TensorBoard, memory_gb
from seergate.distill.checkpoint import (
    Checkpoint,
    check_same_run,
    clear_drafts,
    load_checkpoint,
    newest_checkpoint,
    random_states,
    read_record,
    remove_checkpoints,
    save_checkpoint,
    set_random_states,
)
from seergate.distill.config import TrainConfig, locate_model
from seergate.distill.data import TrainingData, prepare_data
from seergate.distill.distributed import World, join_world
from seergate.distill.engines import DistillModule, make_engine, prepare_deepspeed
from seergate.distill.packing import PackOrder
from seergate.errors import SeergateError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up to ``lr``, then a cosine that reaches ``min_lr`` at the last step; ``step`` counts from 0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - 1 - config.warmup_steps)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def run_distillation(config: TrainConfig, callbacks: Iterable[Callback] = ()) -> Path:
    """Distil gates for a frozen model, or continue where a run of the same options was interrupted.

    Started in several processes (`torchrun`, `accelerate launch`, `deepspeed`), they share the work.

    Args:
        config: the run. ``config.deepspeed`` chooses DeepSpeed's engine.
        callbacks: listeners beside the console and TensorBoard; called in the main process only.

    Returns:
        The adapter's directory.

    Raises:
        SeergateError: for whatever the user can mend: model, data, checkpoint of another run.
    """
    config = replace(config, output_dir=str(config.run_dir))
    located = locate_model(config)
    if config.run_dir.exists() and not config.run_dir.is_dir():
        raise SeergateError(f"output_dir is {str(config.run_dir)!r}, which is a file; it must be a directory")
    if config.deepspeed:
        prepare_deepspeed()
    world = join_world(deepspeed=bool(config.deepspeed))
    _share_cores(world)
    if not world.is_main:
        from transformers.utils import logging

        logging.disable_progress_bar()
    try:
        return _Run(config, located.model, world, callbacks).run()
    finally:
        world.leave()


@dataclass
class _Progress:
    """What the loop carries from step to step besides the engine's state."""

    tokens: int = 0
    best_kl: float | None = None
    best_step: int | None = None
    final_kl: float | None = None


class _Run:
    def __init__(self, config: TrainConfig, model_path: str, world: World, callbacks: Iterable[Callback]) -> None:
        self.config, self.model_path, self.world = config, model_path, world
        self.dir = config.run_dir
        self.callbacks: list[Callback] = list(callbacks) if world.is_main else []
        self.progress = _Progress()

    def run(self) -> Path:
        """All of it; returns the adapter's directory."""
        config, world = self.config, self.world
        self._check_model()
        self._look_for_checkpoint()
        self.tokenizer = _load_tokenizer(self.model_path, config.revision)
        self.data = self._prepare_data()
        self.identity = {
            **config.result_shaping(),
            "model_fingerprint": self.model_fingerprint,
            "data_fingerprint": self.data.fingerprint,
        }
        base = _load_base(self.model_path, config, world)
        torch.manual_seed(config.seed)
        bank = GateBank.for_model(base, self._gate_config(base)).to(world.device, torch.float32)
        # The name the user gave, not where it was found: the adapter must load on other machines.
        bank.geometry = replace(bank.geometry, base_model=config.model)
        self.bank, self.module = bank, DistillModule(bank, base, config)
        self.engine = make_engine(bank, base, config, world)
        done = self._resume()
        self._open_callbacks(done)
        try:
            self._train(done)
            self._export(self.dir)
        finally:
            for callback in self.callbacks:
                callback.close()
        if world.is_main and config.push_to_hub:
            bank.push_to_hub(config.push_to_hub)
        world.barrier()
        return self.dir

    def _gate_config(self, model: PreTrainedModel) -> GateConfig:
        from seergate.host.families import head_dim_of

        c = self.config
        return GateConfig(
            block_size=c.block_size,
            gate_dim=c.gate_dim or head_dim_of(model),
            k_pooling=c.k_pooling,
            q_pooling=c.q_pooling,
            qk_norm=c.qk_norm,
            rope=c.rope,
        )

    def _check_model(self) -> None:
        """Find out whether gates fit the model before any data or weight is read."""
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            base_config = AutoConfig.from_pretrained(self.model_path, revision=self.config.revision)
            with torch.device("meta"):
                skeleton = AutoModelForCausalLM.from_config(base_config)
        except (OSError, ValueError) as error:
            raise SeergateError(f"the model {self.config.model!r} cannot be loaded: {_first_line(error)}") from error
        GateBank.for_model(skeleton, self._gate_config(skeleton))
        self.model_fingerprint = _fingerprint(Path(self.model_path)) or getattr(base_config, "_commit_hash", None)

    def _look_for_checkpoint(self) -> None:
        """Refuse a run that contradicts the checkpoint it would continue, before long work."""
        root = self.dir / "checkpoints"
        if self.world.is_main:
            clear_drafts(root)
            if not self.config.resume:
                remove_checkpoints(root)
        self.world.barrier()
        if newest := newest_checkpoint(root):
            found = read_record(newest)["run"]
            wanted = {**self.config.result_shaping(), "model_fingerprint": self.model_fingerprint}
            # Whether the data changed is only known once it is prepared; `_resume` compares that too.
            wanted["data_fingerprint"] = found.get("data_fingerprint")
            check_same_run(newest, found, wanted)

    def _prepare_data(self) -> TrainingData:
        """One process of each machine tokenises; the others then find it done."""
        say = _RowCounter() if self.world.is_main else None
        if self.world.local_rank == 0:
            data = prepare_data(self.config, self.tokenizer, say or (lambda rows: None))
        self.world.barrier()
        if self.world.local_rank != 0:
            data = prepare_data(self.config, self.tokenizer)
        if self.world.is_main:
            self.dir.mkdir(parents=True, exist_ok=True)
            self.config.save(self.dir / "train_config.yaml")
            (self.dir / "data.json").write_text(json.dumps(data.report.to_dict(), indent=1))
        return data

    def _resume(self) -> int:
        newest = newest_checkpoint(self.dir / "checkpoints")
        if newest is None:
            return 0
        checkpoint = load_checkpoint(newest)
        check_same_run(newest, checkpoint.run, json.loads(json.dumps(self.identity)))
        self.engine.load(checkpoint.optimizer)
        set_random_states(checkpoint.random)
        self.progress = _Progress(**checkpoint.progress)
        return checkpoint.optimizer.step

    def _open_callbacks(self, done: int) -> None:
        if not self.world.is_main:
            return
        config = self.config
        self.callbacks += [
            Console(config.steps, done, config.log_every),
            TensorBoard(self.dir / "tensorboard", done + 1),
        ]
        parameters = sum(p.numel() for p in self.bank.parameters())
        processes = "" if self.world.size == 1 else f" in {self.world.size} processes"
        engine = "DeepSpeed ZeRO" if config.deepspeed else "PyTorch"
        self._say(self.data.report.summary())
        self._say(
            f"gates: {len(self.bank)} layers, {parameters:,} parameters, for {config.model}; {engine} on "
            f"{self.world.device.type}{processes}"
        )
        if done:
            self._say(f"continuing after step {done} of {config.steps}")

    def _train(self, done: int) -> None:
        config, world = self.config, self.world
        order = PackOrder(len(self.data.train), config.seed)
        layers = len(self.bank)
        for step in range(done, config.steps):
            started = time.monotonic()
            # [loss, tokens, KL per layer, recall per budget and layer], summed over the packs of this process
            sums = torch.zeros(2 + layers * (1 + len(config.recall_budgets)), dtype=torch.float64, device=world.device)
            for pack in order.batch(step, config.packs_per_step, world.rank, world.size):
                batch = self.data.batch(self.data.train[pack]).to(world.device)
                out = self.engine.accumulate(batch)
                sums += _flat(out.loss, batch.tokens, out.kl_per_layer, out.recall)
            lr = learning_rate(config, step)
            norm = self.engine.update(lr)
            loss, tokens, kl, recall = self._unflat(world.sum(sums), config.packs_per_step)
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise SeergateError(
                    f"step {step + 1} gave a loss of {loss} and a gradient norm of {norm}; "
                    "the checkpoint before it is intact"
                )
            self.progress.tokens += tokens
            self.progress.final_kl = sum(kl) / layers
            log = StepLog(
                step=step + 1,
                loss=loss,
                kl_per_layer=kl,
                recall=recall,
                layers=self.bank.geometry.layers,
                grad_norm=norm,
                lr=lr,
                tokens=tokens,
                seconds=time.monotonic() - started,
                memory_gb=memory_gb(world.device),
            )
            for callback in self.callbacks:
                callback.on_step(log)
            last = step + 1 == config.steps
            if self.data.held_out and config.eval_every and (last or (step + 1) % config.eval_every == 0):
                self._evaluate(step + 1)
            if last or (config.save_every and (step + 1) % config.save_every == 0):
                self._checkpoint()

    def _evaluate(self, step: int) -> None:
        config, world = self.config, self.world
        sums = torch.zeros(
            2 + len(self.bank) * (1 + len(config.recall_budgets)), dtype=torch.float64, device=world.device
        )
        with torch.no_grad():
            for samples in self.data.held_out[world.rank :: world.size]:
                batch = self.data.batch(samples).to(world.device)
                loss, kl, recall = self.module(batch.input_ids, batch.cu_seqlens)
                sums += _flat(loss, batch.tokens, kl, recall)
        _, _, kl, recall = self._unflat(world.sum(sums), len(self.data.held_out))
        log = EvalLog(step, kl, recall, self.bank.geometry.layers)
        for callback in self.callbacks:
            callback.on_eval(log)
        if self.progress.best_kl is None or log.kl < self.progress.best_kl:
            self.progress.best_kl, self.progress.best_step = log.kl, step
            self._export(self.dir / "best")

    def _unflat(self, sums: torch.Tensor, packs: int) -> tuple[float, int, list[float], dict[int, list[float]]]:
        values, layers = sums.tolist(), len(self.bank)
        rows = [[v / packs for v in values[i : i + layers]] for i in range(2, len(values), layers)]
        recall = dict(zip(self.config.recall_budgets, rows[1:], strict=True))
        return values[0] / packs, int(values[1]), rows[0], recall

    def _checkpoint(self) -> None:
        state = self.engine.state()  # every process takes part
        if self.world.is_main:
            checkpoint = Checkpoint(state, self.identity, random_states(), vars(self.progress).copy())
            save_checkpoint(self.dir / "checkpoints", checkpoint, self.config.save_total_limit)
        self.world.barrier()

    def _export(self, directory: Path) -> None:
        """Write the adapter, in the frozen model's precision."""
        if not self.world.is_main:
            return
        skip = {"output_dir", "token_cache", "chat_template"}
        self.bank.training_record = {
            "config": {k: v for k, v in self.config.result_shaping().items() if k not in skip},
            "data": self.data.report.to_dict(),
            "tokens_seen": self.progress.tokens,
            "kl_last_step": self.progress.final_kl,
            "kl_held_out_best": self.progress.best_kl,
        }
        adapter = self.bank.to_adapter()
        dtype = next(self.module.base.parameters()).dtype
        tensors = {name: x.to(dtype) if x.is_floating_point() else x for name, x in adapter.tensors.items()}
        save_adapter(replace(adapter, tensors=tensors), directory)

    def _say(self, text: str) -> None:
        for callback in self.callbacks:
            callback.on_message(text)


class _RowCounter:
    """Says now and then how many rows have been read."""

    def __init__(self) -> None:
        self._next = time.monotonic() + 5.0

    def __call__(self, rows: int) -> None:
        if time.monotonic() >= self._next:
            print(f"tokenising: {rows:,} rows", flush=True)
            self._next = time.monotonic() + 5.0


def _flat(loss: torch.Tensor, tokens: int, kl: torch.Tensor, recall: torch.Tensor) -> torch.Tensor:
    numbers = (loss.detach(), torch.tensor(tokens, device=loss.device), kl, recall)
    return torch.cat([x.to(loss.device, torch.float64).reshape(-1) for x in numbers])


def _load_tokenizer(path: str, revision: str | None) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, revision=revision)
    except (OSError, ValueError) as error:
        raise SeergateError(f"the tokenizer of {path!r} cannot be loaded: {_first_line(error)}") from error


def _load_base(path: str, config: TrainConfig, world: World) -> PreTrainedModel:
    """The frozen model, on this process's device."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    names = {"auto": torch.bfloat16 if world.device.type == "cuda" else torch.float32}
    dtype = names.get(config.dtype) or getattr(torch, config.dtype)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, revision=config.revision, dtype=dtype)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise SeergateError(f"the model {path!r} cannot be loaded: {_first_line(error)}") from error
    model.to(world.device)
    return model.eval().requires_grad_(False)


def _fingerprint(directory: Path) -> str | None:
    """Tells the weights of a local model from others: the size of each file and its first and last megabyte.

    Reading all of a large model would take minutes; retrained weights differ everywhere. ``None`` for no directory.
    """
    if not directory.is_dir():
        return None
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(p for p in directory.iterdir() if p.suffix in (".safetensors", ".bin")):
        size = file.stat().st_size
        digest.update(f"{file.name}/{size}/".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(1 << 20))
            stream.seek(max(0, size - (1 << 20)))
            digest.update(stream.read())
    return digest.hexdigest()


def _share_cores(world: World) -> None:
    """Several processes on one CPU must not each start a thread per core."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    if world.device.type == "cpu" and here > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // here))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
