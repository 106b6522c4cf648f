"""One run: its checks, data, gates, steps, evaluations and checkpoints.

Contents of a run's output directory:

* ``gate_config.json``, ``gate_model.safetensors``, ``README.md``: the trained adapter
* ``best/``: the adapter with the lowest KL on the held-out packs
* ``train_config.yaml``: the options, with Hub revisions replaced by commits
* ``data.json``: counts of rows, samples and packs (`DataReport`)
* ``commits.json``: the pinned commits (`seergate.distill.commits`)
* ``checkpoints/step-00000100/``: checkpoints to resume from
* ``tensorboard/``: event files, if ``report_to`` names it
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from transformers import PreTrainedModel

from seergate.distill import commits
from seergate.distill.averages import Averages
from seergate.distill.base_model import (
    base_dtype,
    check_model,
    fresh_gates,
    frozen_config,
    load_frozen,
    offload_folder,
)
from seergate.distill.callbacks import Callback, Console, EvalLog, StepLog
from seergate.distill.checkpoint import (
    Checkpoint,
    check_same_run,
    clear_drafts,
    load_checkpoint,
    newest_checkpoint,
    read_record,
    remove_checkpoints,
    save_checkpoint,
)
from seergate.distill.config import TrainConfig, locate_model
from seergate.distill.data import prepare_data, token_files
from seergate.distill.distributed import DistributedState, Diverged
from seergate.distill.engines import check_engine, check_zero, make_engine
from seergate.distill.losses.distill_loss import PUBLISHED_SCALE, DistillOutput, DistillSpec
from seergate.distill.memory import capacity, decide_sharding, overhead, peak_bytes
from seergate.distill.packing import packs_of_step
from seergate.distill.tracking import check_trackers, open_trackers
from seergate.durable import lock, naming
from seergate.errors import SeergateError, first_line
from seergate.fingerprint import fingerprint
from seergate.gates import ADAPTER_FILES, base_note, save_adapter
from seergate.gates.files import CONFIG_FILE
from seergate.models.families import check_gates
from seergate.models.gate_bank import GateBank
from seergate.models.loading import download_weights, skeleton
from seergate.pretrained import load_tokenizer

LOCK = ".lock"
"""Empty file of an output directory, locked by the process that writes to it."""

NON_FINITE_LIMIT = 20
"""Maximum number of packs that a run may leave out because their loss or gradient is not finite."""


def scheduled_rate(config: TrainConfig, step: int) -> float:
    """Return the learning rate of a step, from 0: linear warm-up to ``learning_rate``, then cosine to ``min_lr``."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.max_steps - 1 - config.warmup_steps)
    return config.min_lr + (config.learning_rate - config.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


@dataclass
class Progress:
    """State of the training loop that is saved in checkpoints."""

    tokens: int = 0
    held_out_kl: float | None = None  # of the current gates
    held_out_recall: dict[str, float] | None = None  # token budget -> mean recall of the current gates
    held_out_row_start: float | None = None  # of both
    best_kl: float | None = None
    best_step: int | None = None
    best_row_start: float | None = None
    final_kl: float | None = None
    non_finite: int = 0


class Run:
    """A run of `run_together`. Its stages: `begin`, `gather`, `prepare`, steps of training, `finish`, `close`."""

    def __init__(self, name: str, config: TrainConfig, world: DistributedState, callbacks: Iterable[Callback]) -> None:
        self.name, self.world, self.dir = name, world, config.run_dir
        with world.fail_together():
            self.model_path = locate_model(config).model
        self.config = replace(config, output_dir=str(self.dir))
        self.callbacks: list[Callback] = list(callbacks) if world.is_main else []
        self.progress = Progress()
        self.locked: IO[bytes] | None = None
        self.owns_directory = False
        self.diverged = False  # not the error, whose traceback would keep the frozen model

    def begin(self) -> None:
        """Raise `SeergateError` early if the run cannot start or contradicts the checkpoint it would resume from."""
        world, root = self.world, self.dir / "checkpoints"
        with world.fail_together():
            check_engine(self.config, world.size)
            if self.config.deepspeed:
                check_zero(self.config, world.size)
            check_trackers(self.config)
        self.check()
        world.from_main(lambda: clear_drafts(root))  # before long work, which may need the room
        newest = newest_checkpoint(root) if self.config.resume else None
        world.must_agree(
            str(newest and newest.name),
            f"the processes see different checkpoints in {root}; output_dir must be on a file system that all share",
        )
        with world.fail_together():
            self.check_checkpoint()

    def prepare(
        self, base: PreTrainedModel | None, sharded: bool, headless: bool, shows_steps: bool
    ) -> PreTrainedModel:
        """Create gates and engine, resume, and open the callbacks; returns the frozen model, loaded if ``None``."""
        self.sharded = sharded
        config, world = self.config, self.world
        world.from_main(lambda: replace(config, resume=True).save(self.dir / "train_config.yaml"))  # for a repetition
        if base is None:
            world.in_turn(lambda: download_weights(self.model_path, config.revision))
        self.identity = {**self._shaping(), "data_fingerprint": self.data.fingerprint}
        with world.fail_together():
            base = base or load_frozen(self.model_path, replace(config, shard_base=sharded), world, headless)
            torch.manual_seed(config.seed)
            bank = fresh_gates(config, base).to(world.device, torch.float32)
            check_gates(base, bank)
        if self.model.gates is not None:
            bank.load_state_dict(self.model.gates.state_dict())
            bank.licence = dict(self.model.gates.licence)
            dense = self.model.gates.decode_defaults.get("dense_layers", ())
            if dense := [layer for layer in dense if layer not in config.anchors]:
                bank.decode_defaults = {**bank.decode_defaults, "dense_layers": dense}
        # The name given by the user instead of the resolved path, so that the adapter loads on other machines.
        bank.geometry = replace(bank.geometry, base_model=config.model)
        self.bank, self.base = bank, base
        self.engine = make_engine(bank, config, world)
        self.done = self._resume()
        with world.fail_together():
            if world.is_main:
                console = Console(config.max_steps, self.done, config.logging_steps, self.name, shows_steps)
                self.callbacks += [console, *open_trackers(config, self.done + 1)]
            for text in self._introduction():
                self.say(text)
        return base

    def check(self) -> None:
        """Pin commits and check the model."""
        world = self.world
        with world.fail_together():
            if self.dir.exists() and not self.dir.is_dir():
                raise SeergateError(f"output_dir is {str(self.dir)!r}, which is a file; it must be a directory")
            for data in (Path(one.data).expanduser().resolve() for one, _ in self.config.sources):
                inside = data.is_dir() and self.dir.resolve().is_relative_to(data)
                if inside or data == self.dir.resolve() / "data.json":
                    raise SeergateError(
                        f"data is {str(data)!r}, where this run writes files of its own ({self.dir}); give another "
                        "output_dir"
                    )
            best = (self.dir / "best").resolve()
            if self.config.init_gates and Path(self.config.init_gates).resolve() in (best, self.dir.resolve()):
                raise SeergateError("init_gates lies in output_dir, where it is replaced; give another output_dir")
            newest = newest_checkpoint(self.dir / "checkpoints")
            if self.config.resume and newest is None and (self.dir / CONFIG_FILE).exists():
                raise SeergateError(
                    f"{self.dir} holds gates, and no checkpoint to continue from; --no-resume replaces them"
                )
            others = {file.name for file in best.glob("[!.]*")} - ADAPTER_FILES
            if others and not (self.config.resume and newest):
                raise SeergateError(
                    f"{best} has {min(others)} and would be replaced by gates; give another output_dir"
                )
        self.config, self.commits = world.from_main(lambda: commits.pin(self.config, self.dir))
        self.model = world.in_turn(lambda: check_model(self.model_path, self.config))
        length = self.model.max_length  # a budget that covers a whole pack has a recall of 1
        budgets = tuple(budget for budget in self.config.recall_budgets if budget < length)
        self.config = replace(self.config, max_length=length, recall_budgets=budgets).for_heads(self.model.head_dim)
        world.must_agree(
            f"{self.model.fingerprint} {self._gates_fingerprint()}",
            "the processes see different weights; model and init_gates must be the same on every machine",
        )
        world.from_main(self._lock)
        self.owns_directory = True

    def _lock(self) -> None:
        """Lock the output directory, so that two runs do not replace each other's checkpoints."""
        self.dir.mkdir(parents=True, exist_ok=True)
        self.locked = (self.dir / LOCK).open("ab")
        lock(self.locked, self.dir, "use another output_dir")

    def gather(self) -> None:
        """Write the commits and the data report; read, tokenise and pack the data."""
        world, config = self.world, self.config
        world.from_main(lambda: commits.keep(self.commits, self.dir))
        tokenizer = world.in_turn(lambda: load_tokenizer(self.model_path, revision=config.revision))
        one_sample = self.model.why_one_sample is not None
        files = world.from_main(lambda: token_files(config, tokenizer))
        self.data = world.in_turn(lambda: prepare_data(config, tokenizer, one_sample, files, self.model.vocabulary))
        world.must_agree(
            self.data.fingerprint, "the processes see different data; data must be the same on every machine"
        )
        with world.fail_together():
            self.check_checkpoint(self.data.fingerprint)
        report = json.dumps(asdict(self.data.report), indent=1)
        with naming(file := self.dir / "data.json"):
            world.from_main(lambda: file.write_text(report, encoding="utf-8"))

    def finish(self) -> None:
        """Write the adapter and, with ``push_to_hub``, upload it. If the upload fails, the adapter is still saved."""
        if self.progress.non_finite and self.progress.final_kl is None:
            self.say("no pack of the last step gave a finite loss: the gates may have diverged")
        self.world.from_main(lambda: self._export(self.dir))
        repo = self.config.push_to_hub
        if repo is None or not self.world.is_main:
            return
        if note := base_note(self.config.model):
            self.say(note)
        try:
            address = GateBank.from_pretrained(self.dir).push_to_hub(repo)
        except Exception as error:  # network and server errors of any type end the run with one sentence
            raise SeergateError(
                f"the gates are trained and saved in {self.dir}, but not uploaded to {repo}: {first_line(error)}; "
                f"the same command{'' if self.config.resume else ', without --no-resume,'} uploads them without "
                "training again"
            ) from error
        self.say(f"uploaded: {address}")

    def close(self) -> None:
        """Close the callbacks, delete offloaded layers, and let other processes write to the output directory."""
        for callback in self.callbacks:
            callback.close()
        if self.owns_directory:  # else the layers may be another run's
            shutil.rmtree(offload_folder(self.config, self.world), ignore_errors=True)
        if self.locked is not None:
            self.locked.close()

    def needs_sharding(self) -> bool:
        """Return whether to shard the frozen model: on request, or if each process has no memory for a full copy."""
        bare = skeleton(frozen_config(self.model_path, self.config))
        bank = fresh_gates(replace(self.config, init="random"), bare)
        device, size = self.world.device, self.world.size
        memory = capacity(device, size)
        room = memory - overhead(device, memory)
        return bool(decide_sharding(bare, bank, self.config, device, size, room).shard_base)

    def check_checkpoint(self, data: str | None = None) -> None:
        """Raise `SeergateError` if the run contradicts the checkpoint from which it would resume; ``data`` is the
        fingerprint of the data, once it is known.
        """
        if self.config.resume and (newest := newest_checkpoint(self.dir / "checkpoints")):
            recorded = read_record(newest)["run"]
            known = {**self._shaping(), "data_fingerprint": data}
            later = {"data_fingerprint"} if data is None else set()
            if self.config.gradient_accumulation_steps is not None:  # the number of processes is not known yet
                later |= {"packs_per_step", "gradient_accumulation_steps"}
            check_same_run(newest, recorded, {**known, **{name: recorded.get(name) for name in later}})

    def _shaping(self) -> dict[str, Any]:
        """Return the options and fingerprints, except the data's, that must be equal to resume from a checkpoint."""
        scale = {"loss_scale": PUBLISHED_SCALE} if self.config.reduction == "published" else {}
        model = {"model_fingerprint": self.model.fingerprint, "model_rope": self.model.rope}
        gates = {"init_gates_fingerprint": self._gates_fingerprint()}
        return {**self.config.result_shaping(), **scale, **model, **gates}

    def _gates_fingerprint(self) -> str | None:
        return None if self.model.gates is None else fingerprint(self.model.gates)

    def _resume(self) -> int:
        root = self.dir / "checkpoints"
        # Old checkpoints are deleted only now, since a run that is refused must leave them intact.
        clear = clear_drafts if self.config.resume else remove_checkpoints
        self.world.from_main(lambda: clear(root))
        newest = newest_checkpoint(root)
        if newest is None:
            self.world.from_main(lambda: shutil.rmtree(self.dir / "best", ignore_errors=True))  # of another run
            return 0
        with self.world.fail_together():
            checkpoint = load_checkpoint(newest)
            check_same_run(newest, checkpoint.run, json.loads(json.dumps(self.identity)))
        self.engine.load(checkpoint.state, checkpoint.step)
        self.progress = Progress(**checkpoint.progress)
        return checkpoint.step

    def _introduction(self) -> Iterator[str]:
        """Yield the messages to show before the first step."""
        config, world = self.config, self.world
        yield self.data.report.summary()
        if uneven := config.uneven(world.size):
            yield uneven
        if self.sharded:
            yield f"the frozen model is divided among {world.size} processes"
        if self.model.why_one_sample:
            yield f"a pack holds one sample: {self.model.why_one_sample}"
        parameters = self.bank.num_parameters
        processes = "" if world.size == 1 else f" in {world.size} processes"
        yield (
            f"gates: {len(self.bank)} layers, {parameters:,} parameters, for {config.model}; {self.engine.name} on "
            f"{world.device.type}{processes}"
        )
        if config.eval_steps and config.eval_packs and not self.data.held_out:
            yield f"no evaluations and no best/: at most a tenth of the packs ({len(self.data.train)}) is held out"
        if self.done:
            yield f"continuing after step {self.done} of {config.max_steps}"

    def packs(self, step: int) -> list[list[int]]:
        """Return the sample numbers of each pack of a step, over all processes."""
        train, config = self.data.train, self.config
        return [train[number] for number in packs_of_step(len(train), config.seed, step, config.packs_per_step)]

    @property
    def eval_row_start(self) -> float:
        """Fraction of each sample from which on rows count in evaluations."""
        given = self.config.eval_row_start
        return self.config.row_start if given is None else given

    def spec(self, number: int, held_out: bool) -> DistillSpec:
        """Return the options of the gates' loss on a pack; ``number`` shifts the rows that count with a stride."""
        options = self.config.loss_options
        if held_out:
            options["row_start"] = self.eval_row_start
        return DistillSpec(self.bank, **options, row_shift=number)

    def update(self, step: int, outputs: list[DistillOutput], started: float, stop: bool) -> bool:
        """Take an optimizer step with the accumulated gradients, and report it with the time since ``started``.
        Returns whether any process was asked to stop.
        """
        config, progress, packs = self.config, self.progress, self.config.packs_per_step
        means = Averages.over(self.bank, config.recall_budgets, self.world, outputs, packs, stop)
        if means.non_finite:
            progress.non_finite += means.non_finite
            text = (
                f"step {step + 1}: {means.non_finite} of {packs} packs gave no finite loss and gradient and were left "
                f"out ({progress.non_finite} in this run)"
            )
            if progress.non_finite > NON_FINITE_LIMIT:
                raise Diverged(
                    f"{text}; more than {NON_FINITE_LIMIT} is too many. If "
                    "the gates have diverged, start over with a smaller learning_rate; else leave out these data"
                )
            self.say(text)
        # AdamW's momentum would move the gates even if no pack gave a gradient.
        lr = scheduled_rate(config, step) if means.non_finite < packs else 0.0
        norm = self.engine.update(lr)
        if not math.isfinite(norm):
            raise Diverged(f"step {step + 1} gave a gradient norm of {norm}; the checkpoint before it is intact")
        progress.tokens += means.tokens
        progress.held_out_kl = progress.held_out_recall = progress.held_out_row_start = None
        kl = sum(means.kl_per_layer) / len(self.bank)
        progress.final_kl = kl if math.isfinite(kl) else None
        log = StepLog(
            step=step + 1,
            loss=means.loss,
            kl_per_layer=means.kl_per_layer,
            recall={budget: [sum(heads) / len(heads) for heads in rows] for budget, rows in means.recall.items()},
            layers=self.bank.geometry.layers,
            grad_norm=norm,
            learning_rate=lr,
            tokens=means.tokens,
            seconds=time.monotonic() - started,
            memory_gb=peak_bytes(self.world.device) / 1e9,
        )
        for callback in self.callbacks:
            callback.on_step(log)
        return means.stop

    def evaluates(self, step: int) -> bool:
        """Return whether the held-out packs are evaluated after a step."""
        every, done = self.config.eval_steps, step + 1
        return bool(self.data.held_out and every and (done == self.config.max_steps or done % every == 0))

    def lacks_evaluation(self) -> bool:
        """Return whether an evaluation is due that a stop signal left out or that had other options."""
        done, progress = self.done, self.progress
        recorded = progress.held_out_row_start, sorted(map(int, progress.held_out_recall or ()))
        current = self.eval_row_start, sorted(self.config.recall_budgets)
        return done > 0 and self.evaluates(done - 1) and recorded != current

    def evaluated(self, step: int, outputs: list[DistillOutput], stop: bool) -> bool:
        """Report an evaluation, given this process's outputs, and export the gates if they are the best so far.
        Returns whether any process was asked to stop.
        """
        count = len(self.data.held_out)
        means = Averages.over(self.bank, self.config.recall_budgets, self.world, outputs, count, stop)
        if means.non_finite:
            lost = f"{means.non_finite} of {count} held-out packs gave no finite loss and were left out"
            self.say(f"step {step + 1}: {lost}")
        log = EvalLog(step + 1, means.kl_per_layer, means.recall, self.bank.geometry.layers)
        for callback in self.callbacks:
            callback.on_eval(log)
        progress = self.progress
        if not math.isfinite(log.kl):
            return means.stop
        other_rows = progress.best_row_start not in (None, self.eval_row_start)
        progress.held_out_kl, progress.held_out_row_start = log.kl, self.eval_row_start
        progress.held_out_recall = {str(budget): share for budget, share in log.mean_recall().items()}
        ended = self.done == self.config.max_steps  # only the last gates are there to be evaluated again
        if progress.best_kl is None or (not ended if other_rows else log.kl < progress.best_kl):
            progress.best_kl, progress.best_step, progress.best_row_start = log.kl, step + 1, self.eval_row_start
            self._export(self.dir / "best")
        return means.stop

    def save(self, step: int, stop: bool) -> None:
        """Write a checkpoint after a step if ``save_steps`` requires one, or if the run ends or stops."""
        every, done = self.config.save_steps, step + 1
        if not (stop or done == self.config.max_steps or (every and done % every == 0)):
            return
        state = self.engine.state()  # all processes must call it
        checkpoint = Checkpoint(done, state, self.identity, vars(self.progress).copy())
        root, keep = self.dir / "checkpoints", self.config.save_total_limit
        self.world.from_main(lambda: save_checkpoint(root, checkpoint, keep))

    def _export(self, directory: Path) -> None:
        """Write the adapter in the dtype of the frozen model."""
        if not self.world.is_main:
            return
        skip, progress, best = {"output_dir", "token_cache", "chat_template"}, self.progress, self.progress.best_kl
        self.bank.training_record = {
            "config": {k: v for k, v in self.config.result_shaping().items() if k not in skip},
            "data": asdict(self.data.report),
            "tokens_seen": progress.tokens,
            "kl_last_step": progress.final_kl,
            "kl_held_out": progress.held_out_kl,
            "kl_held_out_row_start": progress.held_out_row_start,
            "kl_held_out_best": best if progress.best_row_start == progress.held_out_row_start else None,
            "recall_held_out": progress.held_out_recall,
        }
        save_adapter(self.bank.cast(base_dtype(self.config, self.world.device)), directory)

    def say(self, text: str) -> None:
        """Show a message to the user."""
        for callback in self.callbacks:
            callback.on_message(text)
