"""The training loop: runs distil gates from one frozen model, which computes each pack once for all of them."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from seergate.config import SCORERS
from seergate.distill.base_model import FROZEN, join_all_gathers
from seergate.distill.callbacks import Callback
from seergate.distill.config import TrainConfig
from seergate.distill.data import DataReport
from seergate.distill.distributed import CommonError, DistributedState, Diverged, expect_steps, init_distributed
from seergate.distill.engines import prepare_deepspeed
from seergate.distill.losses.distill_loss import DistillOutput
from seergate.distill.losses.teacher_forward import distill_steps
from seergate.distill.packing import packed
from seergate.distill.stopping import Stopped, stop_requests
from seergate.distill.training_run import Run
from seergate.errors import SeergateError
from seergate.hub import offline
from seergate.models.loading import download_weights
from seergate.progress import working


def prepare_run(config: TrainConfig) -> DataReport:
    """Do the work of a run that needs no GPU: pin commits, download model and data, tokenise and pack.

    Afterwards the run can start offline on every machine that shares the Hub's cache, ``token_cache`` and
    ``output_dir``. An interrupted run in ``output_dir`` can still be resumed. Raises `SeergateError` as a run does.
    """
    alone = DistributedState(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    run = Run("", config, alone, ())
    try:
        run.check()
        run.check_checkpoint()
        run.gather()
        download_weights(run.model_path, run.config.revision)
        return run.data.report
    finally:
        run.close()


def run_together(runs: Mapping[str, tuple[TrainConfig, Iterable[Callback]]], *, compared: bool = False) -> list[Path]:
    """Train several runs with one frozen model, which computes each pack once for all of them.

    Each run gives the same result as on its own. A run that diverges ends, and the others go on. Returns the
    directories of the adapters, or raises `Diverged` if there are none.

    Args:
        runs: name -> configuration and callbacks of the run. Only the first run with steps to take shows them; every
            message begins with the name of its run.
        compared: refuse, before training, a run with too little data to hold packs out.
    """
    configs = [config for config, _ in runs.values()]
    for name in FROZEN:
        if len({getattr(config, name) for config in configs}) > 1:
            raise SeergateError(f"runs that share a frozen model must have the same {name}")
    if len(runs) > 1 and (
        services := {name for config in configs for name in config.report_to} - {"tensorboard", "none"}
    ):
        raise SeergateError(
            f"report_to names {', '.join(sorted(services))}, which keeps one run at a time; use tensorboard"
        )
    through_model = [config.scorer for config in configs if SCORERS[config.scorer].end_to_end]
    if configs[0].deepspeed:
        prepare_deepspeed()
    world = init_distributed(alone=bool(configs[0].deepspeed))
    if not world.is_main:
        import datasets
        from transformers.utils import logging

        logging.disable_progress_bar()
        datasets.disable_progress_bars()
    members: list[Run] = []
    try:
        with offline(world.size > 1 and world.local_rank != 0):  # `in_turn`: local rank 0 has filled the cache
            for name, (config, callbacks) in runs.items():
                config = config.in_processes(world.size)
                if through_model:  # gradients flow through the model, which cannot be sharded
                    config = replace(config, shard_base=False)
                members.append(Run(name, config, world, callbacks))
                members[-1].begin()
            if len({run.config.revision for run in members}) > 1:  # in a study of several processes, each looks it up
                raise CommonError("the runs have pinned different commits of the model; give one by --revision")
            for run in members:
                run.gather()
                if compared and not run.data.held_out:
                    raise CommonError(
                        f"{run.dir} has no held-out packs to compare: at most a tenth of {len(run.data.train)} packs "
                        "is held out; give more data, or a smaller max_length"
                    )
            # The runs share the model, so it is sharded if one of them has no memory for a full copy.
            sharded = world.from_main(lambda: any(run.needs_sharding() for run in members))
            base, shown = None, False
            for run in members:
                base = run.prepare(base, sharded, headless=not through_model, shows_steps=not shown)
                shown |= run.done < run.config.max_steps
        expect_steps()
        with stop_requests(world.is_main, all(run.config.resume for run in members)) as requested:
            _train(members, requested)
        ended = [run for run in members if not run.diverged]
        for run in ended:
            run.finish()
        world.leave()
        return [run.dir for run in ended]
    except torch.OutOfMemoryError as error:
        advice = "`seergate plan` with the same options says what it needs; max_length and quantize help"
        if through_model:
            advice = f"scorer {through_model[0]!r} trains through the whole model; make max_length smaller"
        longest = max(run.config.max_length for run in members)
        raise SeergateError(
            f"a pack of {longest} tokens does not fit in the memory that {world.device} has left; {advice}"
        ) from error
    finally:
        for run in members:
            run.close()
        if world.size == 1:  # after an error, several processes must not wait: see `exit_without_barrier`
            world.leave()


def _train(runs: list[Run], requested: set[int]) -> None:
    """Train all runs until they end or a signal is ``requested``. Runs may start and end at different steps. Runs that
    train on the same packs share the frozen model's forward pass.
    """
    world, last, stop = runs[0].world, max(run.config.max_steps for run in runs), False

    def stopped(done: int) -> Stopped:
        number = int(world.from_main(lambda: max(requested, default=0)) or signal.SIGTERM)
        return Stopped(f"after step {done} of {last}", number, all(run.config.resume for run in runs))

    for run, evaluation in _evaluate([run for run in runs if run.lacks_evaluation()]).items():
        stop |= run.evaluated(run.done - 1, evaluation, bool(requested))
    if stop:
        raise stopped(min(run.done for run in runs))
    for step in range(min(run.done for run in runs), last):
        active = [run for run in runs if run.done <= step < run.config.max_steps and not run.diverged]
        started, outputs = time.monotonic(), dict[Run, list[DistillOutput]]()
        for group in _sharing(active):
            outputs |= _distill(group, group[0].packs(step), step * group[0].config.packs_per_step)
        for run in active:
            try:
                stop |= run.update(step, outputs[run], started, bool(requested))
            except Diverged as error:
                run.diverged = True
                if all(each.diverged for each in runs):
                    raise Diverged(f"{run.name}: {error}" if run.name else str(error)) from None
                run.say(f"{error}; this run ends here")
        active = [run for run in active if not run.diverged]
        evaluating = [run for run in active if run.evaluates(step) and not stop]  # else it is made up for later
        for run, evaluation in _evaluate(evaluating).items():
            stop |= run.evaluated(step, evaluation, bool(requested))
        for run in active:
            run.save(step, stop)
        if stop:
            raise stopped(step + 1)


def _sharing(runs: list[Run]) -> list[list[Run]]:
    """Group runs that train on the same packs."""
    groups: dict[tuple[str, int, int], list[Run]] = {}
    for run in runs:
        key = run.data.fingerprint, run.config.max_length, run.config.packs_per_step
        groups.setdefault(key, []).append(run)
    return list(groups.values())


@working("evaluating the held-out packs")
def _evaluate(runs: list[Run]) -> dict[Run, list[DistillOutput]]:
    """Run this process's share of the held-out packs."""
    outputs = dict[Run, list[DistillOutput]]()
    for group in _sharing(runs):
        outputs |= _distill(group, group[0].data.held_out, 0, held_out=True)
    return outputs


def _distill(
    runs: list[Run], packs: list[list[int]], first_number: int, *, held_out: bool = False
) -> dict[Run, list[DistillOutput]]:
    """Run this process's share of the packs through the frozen model, once for all runs, and accumulate gradients.

    Args:
        packs: sample numbers of each pack, over all processes.
        first_number: number of the first pack; with a row stride, it determines which rows count.
        held_out: evaluate only, without gradients.
    """
    world, base, samples = runs[0].world, runs[0].base, runs[0].data.samples
    outputs: dict[Run, list[DistillOutput]] = {run: [] for run in runs}
    for place in range(world.rank, world.rank + len(packs), world.size):
        if place >= len(packs):  # other processes have one pack more than this one
            join_all_gathers(base)
            for run in runs:
                if not held_out:
                    run.engine.skip()
            continue
        ids, cu_seqlens = packed([samples[number] for number in packs[place]])
        with torch.set_grad_enabled(not held_out):
            specs = [run.spec(first_number + place, held_out) for run in runs]
            losses = distill_steps(specs, base, ids, cu_seqlens)
        for run, output in zip(runs, losses, strict=True):
            if not held_out:
                run.engine.accumulate(output.loss)
            outputs[run].append(replace(output, loss=output.loss.detach()))
    return outputs
