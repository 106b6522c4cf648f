"""Data-parallel generation: processes that each hold the model and take samples from one common source.

A sample is given to one process only, whichever is free first. The main process generates too; it alone grades and
writes. A process that dies gives back what it was working on: the others make it, and nothing is lost but its time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from seergate.errors import SeergateError
from seergate.eval.engine import Engine, Generation, Limit, Request
from seergate.eval.sampling import Sampling
from seergate.eval.settings import MethodSpec
from seergate.hf.attach import attached

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from seergate.hf.bank import GateBank

    Gates = GateBank | dict[int, GateBank] | None
    Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase, Gates]

Loader = Callable[[int], "Loaded"]
"""``(number of the process, from 1) -> (model, tokenizer, gates)``; must be picklable. Several sets of gates are a
dictionary, by block size.
"""


class Source:
    """Requests that several threads take from; each is taken once."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._waiting = deque(requests)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        with self._lock:
            if not self._waiting:
                raise StopIteration
            return self._waiting.popleft()

    def give_back(self, requests: Iterable[Request]) -> None:
        """Let somebody else make these."""
        with self._lock:
            self._waiting.extend(requests)

    def __bool__(self) -> bool:
        return bool(self._waiting)


@dataclass(frozen=True)
class Job:
    """One setting.

    Attributes:
        spec: the method.
        batch_size, limit, sampling: see `Engine`.
    """

    spec: MethodSpec
    batch_size: int
    limit: Limit
    sampling: Sampling


class WorkerPool:
    """Processes that stay for all settings of a sweep. A context manager: leaving it ends them.

    Args:
        loader: makes a process's own model.
        processes: how many, besides this one.

    Attributes:
        began: whether the processes have been given work, for which they load their models.
    """

    def __init__(self, loader: Loader, processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connections: list[Connection] = []
        self.processes = []
        self.began = False
        for number in range(1, processes + 1):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(loader, number, theirs), daemon=True)
            process.start()
            theirs.close()  # so that its death is noticed here
            self.connections.append(ours)
            self.processes.append(process)

    def begin(self, job: Job, source: Source, on_finished: Callable[[Generation], None]) -> Running:
        """Let all processes take from a source; `Running.join` waits for them."""
        self.began = True
        return Running(self.connections, job, source, on_finished)

    def close(self) -> None:
        """End the processes."""
        for connection, process in zip(self.connections, self.processes, strict=True):
            connection.close()
            process.terminate()
            process.join()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Running:
    """A job in progress: one thread per process hands out requests and takes samples in."""

    def __init__(
        self, connections: list[Connection], job: Job, source: Source, on_finished: Callable[[Generation], None]
    ) -> None:
        self.error: BaseException | None = None
        self.threads = [
            threading.Thread(target=self._serve, args=(connection, job, source, on_finished), daemon=True)
            for connection in connections
        ]
        for thread in self.threads:
            thread.start()

    def _serve(
        self, connection: Connection, job: Job, source: Source, on_finished: Callable[[Generation], None]
    ) -> None:
        lent: dict[Any, Request] = {}
        try:
            connection.send(job)
            while True:
                kind, payload = connection.recv()
                if kind == "next":
                    request = next(source, None)
                    if request is not None:
                        lent[request.key] = request
                    connection.send(request)
                elif kind == "finished":
                    try:
                        on_finished(payload)
                    except BaseException as error:  # of the disk perhaps, and then no death of the process
                        self.error = self.error or error
                        connection.close()  # it still works; without a connection it ends
                        break
                    del lent[payload.request.key]
                elif kind == "failed":
                    self.error = self.error or SeergateError(f"a worker process failed: {payload}")
                    break
                else:
                    break  # done
        except (EOFError, OSError):
            pass  # it died
        except BaseException as error:  # the main thread raises it
            self.error = self.error or error
        source.give_back(lent.values())

    def join(self) -> None:
        """Wait until no process works any more.

        Raises:
            SeergateError: what went wrong in one of them. That one has died is no error.
        """
        for thread in self.threads:
            thread.join()
        if self.error is not None:
            raise self.error


def _work(loader: Loader, number: int, connection: Connection) -> None:
    """The main function of a process."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def die_with_parent() -> None:
        parent.join()
        os._exit(1)  # also out of the middle of a forward pass: nobody waits for it any more

    threading.Thread(target=die_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the main one ends the others
    try:
        loaded: Loaded | None = None
        while True:
            job: Job = connection.recv()
            try:
                loaded = loaded or loader(number)
                _do(job, loaded, connection)
                connection.send(("done", None))
            except Exception as error:
                connection.send(("failed", f"{type(error).__name__}: {error}"))  # fails if that is what has failed
                if not isinstance(error, ValueError):
                    traceback.print_exc()
    except (EOFError, OSError):
        pass  # the main process is done with us


def _do(job: Job, loaded: Loaded, connection: Connection) -> None:
    model, tokenizer, gates = loaded
    bank = gates.get(job.spec.block_size or 0) if isinstance(gates, dict) else gates

    def requests() -> Iterator[Request]:
        while True:
            connection.send(("next", None))
            request = connection.recv()
            if request is None:
                return
            yield request

    with attached(model, job.spec.method(bank), correction=job.spec.correction) as handle:
        Engine(
            model,
            tokenizer,
            batch_size=job.batch_size,
            limit=job.limit,
            sampling=job.sampling,
            on_finished=lambda generation: connection.send(("finished", generation)),
            handle=handle,
        ).run(requests())
