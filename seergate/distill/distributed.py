"""The processes of a run: who launched them, who this one is, and the few collectives they need.

`python`, `torchrun`, `accelerate launch` and the `deepspeed` launcher all describe the processes by the same
environment variables; only the engine differs. accelerate's `PartialState`, which reads them too, is not used: it is a
singleton that several runs in one process cannot undo, and it replaces none of the checks made here.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from seergate.errors import SeergateError, first_line, sentence

T = TypeVar("T")

PATIENCE_HOURS = 24.0
"""Time limit of a collective before the first step, which is long: one process may tokenise a large dataset meanwhile.
The libraries' own 10 to 30 minutes would end such a run. A process that has died is not waited for: the launchers then
end all."""

STEP_HOURS = 0.5
"""Time limit in a step, where the others are late by a pack at most: a link that hangs must end the run."""

PATIENCE_VARIABLE = "SEERGATE_TIMEOUT_HOURS"
"""The environment variable that sets another number of hours for both."""

_MISTAKES = (ValueError, OSError, torch.OutOfMemoryError)
"""Errors shown as one sentence; others keep their traceback."""


class CommonError(SeergateError):
    """Every process of a run raises it with the same text: the main process reports it, the others are silent.

    Any other error is of one process, which reports it with its number.
    """

    is_common = True


def patience(default_hours: float = PATIENCE_HOURS) -> timedelta:
    """Time that a process waits for the others."""
    given = os.environ.get(PATIENCE_VARIABLE) or str(default_hours)
    try:
        hours = float(given)
    except ValueError:
        hours = math.nan
    if not 0 < hours < math.inf:
        raise SeergateError(f"{PATIENCE_VARIABLE} is {given!r}; it must be a positive number of hours")
    return timedelta(hours=hours)


@dataclass(frozen=True)
class DistributedState:
    """This process's place in the distributed run: ``rank`` of ``size``, and ``local_rank`` of its machine."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """True if this process writes and prints."""
        return self.rank == 0

    @property
    def local_size(self) -> int:
        """Processes on this machine."""
        return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)

    def barrier(self) -> None:
        """Wait for every process."""
        self.sum(torch.zeros(1))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            _connected(lambda: dist.all_reduce(x))
        return x

    def from_main(self, make: Callable[[], T]) -> T:
        """Run a function in the main process, and broadcast its result; if it fails, all processes do."""
        made: Any = None
        with self.fail_together():
            if self.is_main:
                made = make()
        return self._everyones(made)[0]  # type: ignore[no-any-return]

    def in_turn(self, make: Callable[[], T]) -> T:
        """Run ``make`` in every process: the main one first, then one of every other machine, then the rest.

        So what the first ones download or compute is in the cache of the others.
        """
        turns = (self.is_main, self.local_rank == 0 and not self.is_main, self.local_rank != 0 and not self.is_main)
        made: list[T] = []
        for mine in turns:
            with self.fail_together():
                if mine:
                    made.append(make())
        return made[0]

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """Run a part of the work in every process; if it fails in one, raise in all of them.

        The part itself must not communicate with other processes. A process without others raises the original error.

        Raises:
            CommonError: in every process, with what the failed ones said and which they are.
        """
        if self.size == 1:
            yield
            return
        failure: Exception | None = None
        message: str | None = None
        try:
            yield
        except _MISTAKES as error:
            failure, message = error, sentence(error)
        except Exception as error:
            failure, message = error, f"{type(error).__name__}: {first_line(error)}"
        said = self._everyones(message)
        if failure is not None and not isinstance(failure, _MISTAKES):
            raise failure
        told = [(rank, text) for rank, text in enumerate(said) if text and text not in said[:rank]]
        if told:
            raise CommonError("; ".join(f"[rank {rank}] {text}" if rank else text for rank, text in told)) from failure

    def must_agree(self, value: str, complaint: str) -> None:
        """Raise a `CommonError` with the complaint in every process, unless all have found the same value."""
        if len(set(self._everyones(value))) > 1:
            raise CommonError(complaint)

    def _everyones(self, own: T) -> list[T]:
        """The object that each process has, in order of their numbers."""
        found = [own] * self.size
        if self.size > 1:
            _connected(lambda: dist.all_gather_object(found, own))
        return found

    def leave(self) -> None:
        """Close the connections, all processes at the same time.

        After an error, which may be of one process alone, see `end_in_company` instead.
        """
        if dist.is_initialized():
            dist.destroy_process_group()


def init_distributed(*, alone: bool = False) -> DistributedState:
    """Connect to the other processes, if there are any; ``alone`` makes a group of this process by itself."""
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    cuda = torch.cuda.is_available()
    if cuda and local_rank >= torch.cuda.device_count():
        raise SeergateError(
            f"process {local_rank} of this machine has no GPU: there are {torch.cuda.device_count()}; "
            "start as many processes"
        )
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if (alone or size > 1) and not dist.is_initialized():
        # Objects, and all that is said before the first step, go through gloo: waiting in NCCL would keep cores and
        # GPUs busy. Its communicators are made at the first sum over packs, after data was tokenised in forked
        # processes, which InfiniBand may not survive.
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        try:
            dist.init_process_group(backend, timeout=patience())
        except RuntimeError as error:
            raise SeergateError(f"the processes of this run could not be connected: {first_line(error)}") from error
    world = DistributedState(rank, size, local_rank, device)
    if device.type == "cpu" and world.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.local_size))  # not one per core for each process
    return world


def expect_steps(group: dist.ProcessGroup | None = None) -> None:
    """From now on a process waits for the others of a group, by default all, as long as a step may take."""
    if dist.is_initialized():
        dist.distributed_c10d._set_pg_timeout(patience(STEP_HOURS), group)


def end_in_company(code: int) -> None:
    """End this process at once if it is connected to others, for which the launcher ends them, too.

    The others may have ended, or be waiting: with NCCL, closing the connections could take as long as a step may.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _connected(talk: Callable[[], object]) -> None:
    """Connect to the other processes."""
    try:
        talk()
    except RuntimeError as error:  # what all backends raise
        raise SeergateError(
            "the connection to the other processes is lost; one of them has failed, and says why, or has not "
            f"answered in time, which {PATIENCE_VARIABLE} sets ({first_line(error)})"
        ) from error
