"""Several processes: each sample is made once, whoever makes it, and whatever happens to them."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from seergate import GateBank, GateConfig
from seergate.errors import SeergateError
from seergate.eval import MethodSpec, RunOptions, Sampling, evaluate, make_task, memory, sweep
from seergate.eval.engine import Generation, Limit, Request
from seergate.eval.workers import Job, Running, Source, WorkerPool
from tests.eval import support

OPTIONS = RunOptions(samples=2, max_new_tokens=60, batch_size=2, sampling=Sampling(temperature=1.0))
SPECS = [MethodSpec("dense"), MethodSpec("oracle", 32, 16)]


def load(directory: str, number: int):
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(directory).eval(), AutoTokenizer.from_pretrained(directory), None


def load_and_say_so(directory: str, mark: str, number: int):
    loaded = load(directory, number)
    loaded[0].register_forward_hook(lambda *_: Path(mark).touch())
    return loaded


def load_with_gates(directory: str, mark: str, number: int):
    model, tokenizer, _ = load_and_say_so(directory, mark, number)
    return model, tokenizer, gates_of(model)


def gates_of(model) -> dict[int, GateBank]:
    """Untrained gates for two block sizes, the same at every call."""
    torch.manual_seed(0)
    return {size: GateBank.for_model(model, GateConfig(block_size=size, gate_dim=16)) for size in (8, 16)}


def load_nothing(error: type[Exception], number: int):
    raise error("there is no model here")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return str(support.save(tmp_path_factory.mktemp("model")))


def task():
    return make_task("chain_sum", problems=8, variables=6)


def completions(directory: Path):
    rows = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    found = {(r["problem_id"], r["sample_idx"]): r["completion"] for r in rows}
    assert len(found) == len(rows) == 16
    return found


def run(out, saved, workers):
    model, tokenizer, _ = load(saved, 0)
    return sweep(model, tokenizer, task(), SPECS, out, OPTIONS, loader=partial(load, saved), workers=workers)


@pytest.mark.slow
def test_two_processes_make_what_one_makes(tmp_path, saved):
    alone, together = run(tmp_path / "one", saved, 0), run(tmp_path / "two", saved, 1)
    for spec in SPECS:
        assert completions(tmp_path / "one" / spec.label) == completions(tmp_path / "two" / spec.label)
        for name in ("accuracy", "mean_tokens", "density", "token_quantiles"):
            assert alone[spec.label][name] == together[spec.label][name]


@pytest.mark.slow
def test_several_sets_of_gates_go_to_every_process(tmp_path, saved):
    """As the block sizes of Figure 7 need; this process waits until the other works, and then goes slowly."""
    model, tokenizer, _ = load(saved, 0)
    banks = gates_of(model)
    specs = [MethodSpec("gate", 32, size, named_block_size=True) for size in banks]
    sweep(model, tokenizer, task(), specs, tmp_path / "one", OPTIONS, banks=banks)
    mark = tmp_path / "working"

    def wait(*_: object) -> None:
        while not mark.exists():
            time.sleep(0.005)
        time.sleep(0.05)

    model.register_forward_hook(wait)
    loader = partial(load_with_gates, saved, str(mark))
    sweep(model, tokenizer, task(), specs, tmp_path / "two", OPTIONS, banks=banks, loader=loader, workers=1)
    alone, together = ([completions(tmp_path / out / spec.label) for spec in specs] for out in ("one", "two"))
    assert alone == together
    assert alone[0] != alone[1], "gates of another block size would have been noticed"


@pytest.mark.slow
def test_a_process_that_dies_loses_nothing(tmp_path, saved):
    """Killed with samples in the making, while this process goes slowly."""
    model, tokenizer, _ = load(saved, 0)
    mark, killed = tmp_path / "working", threading.Event()
    model.register_forward_hook(lambda *_: None if killed.is_set() else time.sleep(0.3))
    with WorkerPool(partial(load_and_say_so, saved, str(mark)), 1) as pool:
        (process,) = pool.processes

        def kill() -> None:
            while not mark.exists():
                time.sleep(0.005)
            os.kill(process.pid, signal.SIGKILL)
            killed.set()

        killer = threading.Thread(target=kill)
        killer.start()
        evaluate(model, tokenizer, task(), SPECS[0], tmp_path, OPTIONS, pool=pool)
        killer.join()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    completions(tmp_path)


@pytest.mark.slow
def test_processes_divide_the_memory_that_is_free(tmp_path, saved, monkeypatch):
    """Estimated batches: half as much for each of two; at first without what the other's model will take."""
    model, tokenizer, _ = load(saved, 0)
    weights, batches = sum(p.nbytes for p in model.parameters()), []
    monkeypatch.setattr(memory, "free_bytes", lambda device: 5 * weights)
    begin = WorkerPool.begin

    def noted(pool, job, *others):
        batches.append(job.batch_size)
        return begin(pool, job, *others)

    monkeypatch.setattr(WorkerPool, "begin", noted)
    options = replace(OPTIONS, batch_size=None, max_new_tokens=None, max_total_tokens=100)
    sweep(model, tokenizer, task(), SPECS, tmp_path, options, loader=partial(load, saved), workers=1)
    room = weights / memory.bytes_per_token(model) / 100 * memory.USABLE / memory.GROWTH
    assert batches == [pytest.approx(4 / 2 * room, abs=1), pytest.approx(5 / 2 * room, abs=1)]
    assert batches[0] + 1 < batches[1] < memory.LARGEST_BATCH


@pytest.mark.slow
@pytest.mark.parametrize("error", [SeergateError, OSError])
def test_what_goes_wrong_in_a_process_is_told(tmp_path, saved, error):
    """An error of its files too: it is no lost connection."""
    model, tokenizer, _ = load(saved, 0)
    with pytest.raises(SeergateError, match=f"a worker process failed: {error.__name__}: there is no model here"):
        loader = partial(load_nothing, error)
        sweep(model, tokenizer, task(), SPECS[:1], tmp_path, OPTIONS, loader=loader, workers=1)


def serve(source: Source, on_finished, replies) -> tuple[Running, Connection]:
    """A job, and the worker's end of its only connection, over which these replies have come."""
    ours, theirs = multiprocessing.Pipe()
    for reply in replies:
        theirs.send(reply)
    return Running([ours], Job(SPECS[0], 1, Limit(8), Sampling()), source, on_finished), theirs


def made(number: int) -> tuple[str, Generation]:
    return "finished", Generation(Request(number, "x"), "y", (1,), 1, "stop", 0.1, {})


def test_a_sample_that_cannot_be_taken_in_is_neither_a_death_nor_lost():
    """A full disk is an `OSError` too. The process is let go: what it says next would not be understood."""

    def full(generation):
        raise OSError(28, "No space left on device")

    source = Source([Request(0, "x"), Request(1, "x")])
    running, theirs = serve(source, full, [("next", None), made(0)])
    with pytest.raises(OSError, match="No space left"):
        running.join()
    assert sorted(request.key for request in source) == [0, 1]
    assert isinstance(theirs.recv(), Job) and theirs.recv().key == 0
    assert theirs.poll(60), "it is left waiting for a reply"
    with pytest.raises(EOFError):
        theirs.recv()


def test_what_a_process_was_given_is_made_by_others_when_it_dies():
    source, taken = Source([Request(i, "x") for i in range(3)]), []
    running, theirs = serve(source, taken.append, [("next", None), ("next", None), made(0)])
    job, *lent = (theirs.recv() for _ in range(3))
    theirs.close()
    running.join()
    assert isinstance(job, Job) and [request.key for request in lent] == [0, 1]
    assert [generation.request.key for generation in taken] == [0]
    assert sorted(request.key for request in source) == [1, 2]


def test_workers_need_a_loader(tmp_path):
    with pytest.raises(SeergateError, match="need a loader"):
        sweep(support.model(), support.tokenizer(), task(), SPECS[:1], tmp_path, OPTIONS, workers=1)
    with pytest.raises(ValueError, match="workers is -1"):
        sweep(support.model(), support.tokenizer(), task(), SPECS[:1], tmp_path, OPTIONS, workers=-1)


def test_a_request_is_taken_once():
    source, taken = Source([Request(i, "x") for i in range(2000)]), []
    threads = [threading.Thread(target=lambda: taken.extend(r.key for r in source)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(2000))
    source.give_back([Request(7, "x")])
    assert [r.key for r in source] == [7]
