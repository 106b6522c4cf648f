"""Generation on several devices or machines with Ray: one actor per device holds the model and an engine.

The driver sends each request to one actor and collects the samples; only the driver grades and writes. If an actor or
its node is lost, the other actors generate its samples. Every sample has its own random generator, so it comes out
the same on any actor.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from seergate.errors import SeergateError, how_to_install
from seergate.eval.generation.engine import Engine
from seergate.eval.generation.samples import Generation, Job, Request
from seergate.eval.settings import Banks
from seergate.fingerprint import fingerprint
from seergate.models.attach import Handle, attach

Loader = Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase, Banks]]
"""``() -> (model, tokenizer, gates)``, called in each actor; must be picklable. Several sets of gates are a dictionary
by name."""


def check_ray() -> None:
    """Raise `SeergateError` if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise SeergateError(f"several workers need Ray; {how_to_install('ray')}")


class Generator:
    """The Ray actor, which generates samples with one model."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.handle: Handle | None = None
        self.finished = list[Generation]()

    def begin(self, job: Job, neighbours: int) -> tuple[int, str, str | None]:
        """Load the model for the first job, and attach a job's method in place of the previous job's; return the batch
        size and the fingerprints of the weights and of the gates. ``neighbours`` is the number of actors that may
        share this device's memory, including this one.
        """
        if self.handle is None:
            self.model, self.tokenizer, self.gates = self.loader()
            self.weights = fingerprint(self.model)
        else:
            self.handle.detach()
        bank = job.spec.bank(self.gates)
        self.handle = attach(self.model, job.spec.method(bank), correction=job.spec.correction)
        self.engine = Engine(self.handle, self.tokenizer, job, self.finished.append, neighbours)
        return self.engine.batch_size, self.weights, job.spec.weights(bank)

    def work(self, requests: list[Request]) -> tuple[list[Generation], int]:
        """Add requests and decode until a sample is finished; return the finished samples and the batch size."""
        self.engine.waiting.extend(requests)
        self.finished.clear()
        while not self.finished and self.engine.step():
            pass
        return list(self.finished), self.engine.batch_size


class Cluster(AbstractContextManager["Cluster"]):
    """The actors, which run for a whole sweep. A context manager: leaving it ends them.

    Args:
        workers: number of actors; 0 for one per GPU of the cluster, or one per node if there are no GPUs.
        address: address of a running Ray cluster, ``"auto"`` for the one of this machine; ``None`` starts Ray here.

    Raises:
        SeergateError: if Ray is not installed, there is no cluster at the address, or this machine has fewer
            GPUs than workers.
    """

    def __init__(self, loader: Loader, workers: int, address: str | None = None) -> None:
        check_ray()
        import ray

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        given: dict[str, Any] = {"num_cpus": workers, "include_dashboard": False} if address is None else {}
        try:
            # without an address Ray would join whatever cluster it finds on the machine
            ray.init(address=address or "local", log_to_driver=False, logging_level=logging.WARNING, **given)
        except ConnectionError as error:
            raise SeergateError(f"there is no Ray cluster at {address!r}: {error}") from error
        gpus = int(ray.cluster_resources().get("GPU", 0))
        self.workers = workers or gpus or len(ray.nodes())
        if address is None and self.workers > gpus > 0:  # they would wait for ever; another cluster may grow
            ray.shutdown()
            raise SeergateError(f"workers is {self.workers} and this machine has {gpus} GPUs; a worker takes one")
        how = {"num_cpus": 1, "num_gpus": int(gpus > 0), "max_restarts": 0, "max_task_retries": 0}
        actor: Any = ray.remote(Generator).options(scheduling_strategy="SPREAD", **how)
        self.actors: list[Any] = [actor.remote(loader) for _ in range(self.workers)]
        # without GPUs, as if all were on one machine: the batch that is estimated may then be too small
        self.neighbours = 1 if gpus else self.workers
        self.ray = ray

    def generate(
        self,
        job: Job,
        weights: str,
        gates: str | None,
        requests: Iterable[Request],
        on_finished: Callable[[Generation], None],
    ) -> None:
        """Generate the samples of a job.

        Args:
            weights, gates: fingerprints of the model and the job's gates that every actor must have loaded.
            on_finished: called with each finished sample, in this thread.

        Raises:
            SeergateError: if an actor fails (with its reason) or has loaded other weights, or if all actors are lost.
        """
        waiting, unfinished, batch_sizes = deque(requests), dict[Any, dict[Any, Request]](), dict[Any, int]()
        for actor, task in [(actor, actor.begin.remote(job, self.neighbours)) for actor in self.actors]:
            batch_sizes[actor], *loaded = self._result(actor, task) or (0, weights, gates)
            for what, own, theirs in zip(("weights", "gates"), (weights, gates), loaded, strict=True):
                if theirs != own:
                    raise SeergateError(f"a worker has loaded other {what} ({theirs}) than this process ({own})")
        share = -(-len(waiting) // len(self.actors))  # so that no actor takes all
        idle, running = list(self.actors), dict[Any, Any]()
        while waiting or any(unfinished.values()):
            for actor in idle:
                assigned = unfinished.setdefault(actor, {})
                room = min(share, batch_sizes[actor]) - len(assigned)
                more = [waiting.popleft() for _ in range(min(len(waiting), room))]
                assigned |= {request.key: request for request in more}
                if assigned:
                    running[actor.work.remote(more)] = actor
            idle = [actor for actor in idle if actor not in running.values()]
            (done, *_), _ = self.ray.wait(list(running))
            actor = running.pop(done)
            result = self._result(actor, done)
            if result is None:
                waiting.extendleft(unfinished.pop(actor).values())
                continue
            finished, batch_sizes[actor] = result
            for generation in finished:
                on_finished(generation)
                del unfinished[actor][generation.request.key]
            idle.append(actor)

    def _result(self, actor: Any, task: Any) -> Any:
        """The result of an actor's task; ``None`` if the actor or its node is lost."""
        try:
            return self.ray.get(task)
        except self.ray.exceptions.RayTaskError as error:
            raise SeergateError(f"a worker failed: {type(error.cause).__name__}: {error.cause}") from error
        except self.ray.exceptions.RayError as error:
            self.actors.remove(actor)
            if not self.actors:
                (*_, reason) = [type(error).__name__, *str(error).strip().splitlines()]
                raise SeergateError(f"all workers are lost; repeat the command to continue ({reason})") from error
            return None

    def __exit__(self, *_: object) -> None:
        for actor in self.actors:
            self.ray.kill(actor)
        self.ray.shutdown()
