"""The processes of a run: connecting them, the rank of this process, and the few collectives that they need.

`python`, `torchrun`, `accelerate launch` and the `deepspeed` launcher describe the processes by the same environment
variables; only the engine differs. accelerate's `PartialState` reads them, too, but is not used: it is a singleton
that several runs in one process cannot reset, and it replaces none of the checks made here.
"""

from __future__ import annotations

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
from seergate.resources import available_cores

T = TypeVar("T")

PATIENCE_HOURS = 24.0
"""Timeout in hours of a collective before the first step. It is long because one process may tokenise a large dataset
meanwhile; the libraries' defaults of 10 to 30 minutes would end such a run. If a process dies, the launcher ends all
others at once."""

STEP_HOURS = 0.5
"""Timeout in hours within a step. Processes differ by at most a pack there, so a longer wait means a broken link."""

_MISTAKES = (ValueError, OSError, torch.OutOfMemoryError)
"""Errors that are reported as one sentence; other errors keep their traceback."""


class CommonError(SeergateError):
    """An error that all processes of a run raise with the same text; only the main process prints it.

    Any other error belongs to one process, which prints it with its rank.
    """

    is_common = True


class Diverged(CommonError):
    """The loss or gradient of a run is not finite."""


@dataclass(frozen=True)
class DistributedState:
    """This process's ``rank`` among the ``size`` processes of a run, and its ``local_rank`` on this machine."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is the main process, which writes files and prints."""
        return self.rank == 0

    @property
    def local_size(self) -> int:
        """Number of processes on this machine."""
        return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all processes, in place."""
        if self.size > 1:
            _connected(lambda: dist.all_reduce(x))
        return x

    def from_main(self, make: Callable[[], T]) -> T:
        """Run a function in the main process and return its result in all processes; if it fails, all raise."""
        result: Any = None
        with self.fail_together():
            if self.is_main:
                result = make()
        return self._everyones(result)[0]  # type: ignore[no-any-return]

    def in_turn(self, make: Callable[[], T]) -> T:
        """Run ``make`` in every process: first in the main one, then in one per other machine, then in the rest.

        So the later processes find in the cache what the earlier ones have downloaded or computed.
        """
        own = 0 if self.is_main else 1 if self.local_rank == 0 else 2
        for turn in range(3):
            with self.fail_together():
                if turn == own:
                    result = make()
        return result

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """Raise an error in all processes if the body of the ``with`` block fails in one of them.

        The body must not communicate with other processes. A single process raises the original error.

        Raises:
            CommonError: in every process, with the messages and ranks of the failed processes.
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
        messages = self._everyones(message)
        if failure is not None and not isinstance(failure, _MISTAKES):
            raise failure
        unique = [(rank, text) for rank, text in enumerate(messages) if text and text not in messages[:rank]]
        if unique:
            raise CommonError("; ".join(f"[rank {r}] {text}" if r else text for r, text in unique)) from failure

    def must_agree(self, value: str, complaint: str) -> None:
        """Raise a `CommonError` with the message ``complaint`` in every process unless ``value`` is equal in all."""
        if len(set(self._everyones(value))) > 1:
            raise CommonError(complaint)

    def _everyones(self, own: T) -> list[T]:
        """Gather an object from each process, in order of rank."""
        values = [own] * self.size
        if self.size > 1:
            _connected(lambda: dist.all_gather_object(values, own))
        return values

    def leave(self) -> None:
        """Close the connections; all processes must call this at the same time.

        After an error, which may affect one process only, use `exit_without_barrier` instead.
        """
        if dist.is_initialized():
            dist.destroy_process_group()


def init_distributed(*, alone: bool = False) -> DistributedState:
    """Connect to the other processes, if any; with ``alone``, also make a process group for a single process."""
    size, rank = int(os.environ.get("WORLD_SIZE") or 1), int(os.environ.get("RANK") or 0)
    local_rank = int(os.environ.get("LOCAL_RANK") or 0)
    if not 0 <= rank < size:
        raise SeergateError(
            f"RANK is {rank} and WORLD_SIZE {size}; start the processes with torchrun, which sets both, or unset RANK"
        )
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
        # Objects and all messages before the first step use gloo, since waiting in NCCL keeps cores and GPUs busy.
        # NCCL connects at the first sum over packs: forking workers to tokenise could break an InfiniBand connection.
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        try:
            dist.init_process_group(backend, timeout=timedelta(hours=PATIENCE_HOURS))
        except RuntimeError as error:
            raise SeergateError(f"the processes of this run could not be connected: {first_line(error)}") from error
    world = DistributedState(rank, size, local_rank, device)
    if device.type == "cpu" and world.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, available_cores() // world.local_size))  # the processes share the cores
    return world


def expect_steps(group: dist.ProcessGroup | None = None) -> None:
    """Set the timeout of a process group, by default that of all processes, to the timeout within a step."""
    if dist.is_initialized():
        dist.distributed_c10d._set_pg_timeout(timedelta(hours=STEP_HOURS), group)


def exit_without_barrier(code: int) -> None:
    """Exit at once if this process is connected to others; the launcher then ends the others, too.

    Closing the connections could wait for processes that have ended; with NCCL, for the whole timeout of a step.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _connected(talk: Callable[[], object]) -> None:
    """Run a collective, and report a lost connection as a `SeergateError`."""
    try:
        talk()
    except RuntimeError as error:  # raised by all backends
        raise SeergateError(
            "the connection to the other processes is lost; one of them has failed, and says why, or has not "
            f"answered in time ({first_line(error)})"
        ) from error
