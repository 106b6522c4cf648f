"""Blocks that are fetched ahead: which ones, into which room, on whose thread; none of it shows in a number."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Callable

import pytest
import torch
from transformers import DynamicCache

import seergate
from seergate import methods
from seergate.cache import block_pool
from seergate.cache.background import Background
from seergate.cache.block_pool import BlockPool
from seergate.cache.layer import GatedLayer
from seergate.cache.offload import Offload, OffloadedLayer, next_best
from tests.host.test_decode import BLOCK, gates
from tests.host.test_offload import BLOCK_BYTES, HEADS, check_pools, room_for, run, selecting
from tests.models import left_padded, prompt, tiny_model


class Sooner:
    """A thread that has always finished already."""

    def start(self, work: Callable[[], None]) -> Sooner:
        work()
        return self

    def finish(self) -> None:
        """Nothing is left."""


class Later(Sooner):
    """A thread that begins only when it is waited for."""

    def start(self, work: Callable[[], None]) -> Later:
        later = Later()
        later.finish = work
        return later


class Torn(Sooner):
    """A thread that has read everything at once, and writes it when it is waited for."""

    def start(self, work: Callable[[], None]) -> Torn:
        targets, sources, slots, places = work.args
        found = [source.flatten(0, 1)[places].clone() for source in sources]

        def write():
            for target, rows in zip(targets, found, strict=True):
                target[slots] = rows

        torn = Torn()
        torn.finish = write
        return torn


class Slow(Background):
    """A thread that takes its time."""

    def start(self, work: Callable[[], None]):
        return super().start(lambda: time.sleep(0.002) or work())


def ahead_on(background, blocks: int, ahead: int = 3) -> Offload:
    offload = Offload(room_for(blocks), ahead=ahead)
    vars(offload)["background"] = background
    return offload


def test_timing_changes_nothing():
    """Neither outputs nor what is counted."""
    model = tiny_model("qwen3")
    inputs = left_padded([prompt(90, 1), prompt(41, 2)])
    for method in selecting(model, token_budget=3 * BLOCK)[:2]:
        want, logits, _, _ = run(model, method, inputs, 24)
        figures = []
        for background in (Sooner(), Later(), Torn(), Slow(), Background()):
            found, offloaded, stats, _ = run(model, method, inputs, 24, ahead_on(background, 2 * HEADS * 5))
            assert torch.equal(found, want) and torch.equal(offloaded, logits)
            figures.append(stats)
        assert all(stats == figures[0] for stats in figures)
        assert 0 < figures[0]["fetched_ahead_used"] < 1


@pytest.mark.parametrize("background", [Later, Torn, Background])
@pytest.mark.parametrize("chunk", [1, 3])
def test_a_block_that_is_opened_again_is_never_stale(background, chunk):
    """A block is fetched ahead; before that has been copied tokens are taken back into its middle, and others written
    there, one by one or several at once.
    """
    model = tiny_model("qwen3")
    method = methods.Gate(bank=gates(model), token_budget=2 * BLOCK)
    logits = []
    for offload in (None, ahead_on(background(), HEADS * 12, ahead=40)):
        with torch.no_grad(), seergate.attached(model, method, offload=offload):
            cache = DynamicCache()
            model(input_ids=prompt(10 * BLOCK, 1), past_key_values=cache)
            model(input_ids=prompt(1, 2), past_key_values=cache)
            if offload is not None:
                pool = cache.layers[0].pool
                slots = pool._slot_of[:, 9]  # where the newest full block is, by head
                assert (pool._last_read[slots[slots >= 0]] == 0).any()  # fetched ahead, not read
                assert pool._coming is not None
            cache.crop(-(1 + BLOCK // 2))
            others = prompt(BLOCK, 3)
            for at in range(0, BLOCK, chunk):
                out = model(input_ids=others[:, at : at + chunk], past_key_values=cache)
                logits.append(out.logits)
                if offload is not None:
                    check_pools(cache)
    half = len(logits) // 2
    assert all(torch.equal(*pair) for pair in zip(logits[:half], logits[half:], strict=True))


def test_only_closed_blocks_that_were_not_selected_are_fetched_ahead(monkeypatch):
    """Against loops; in a ragged batch, with NaN and ties among the scores."""
    scores = torch.randint(-4, 4, (3, 2, 9)).float()
    scores[0, 0, 2], scores[1, 1, 3], scores[2, 0, 8] = torch.nan, torch.inf, torch.inf
    lengths = torch.tensor([9 * BLOCK, 4 * BLOCK + 1, 1])
    selected = torch.tensor([[[1, 8, -1], [0, 3, 8]], [[0, 1, 2], [0, 1, 4]], [[0, -1, -1], [0, -1, -1]]])
    for count in (1, 3, 40):
        found = next_best(scores, selected.int(), lengths, BLOCK, count)
        assert found.shape[2] == min(count, 9)
        for row in range(3):
            for head in range(2):
                past = set(range((int(lengths[row]) - 1) // BLOCK)) - set(selected[row, head].tolist())
                worth = {block: float(scores[row, head, block].nan_to_num(nan=-1e30)) for block in past}
                want = sorted(worth.values(), reverse=True)[:count]
                blocks = [block for block in found[row, head].tolist() if block >= 0]
                assert len(set(blocks)) == len(blocks) and [worth[block] for block in blocks] == want

    asked = []
    original = BlockPool.fetch_ahead

    def spying(pool, blocks, *rest):
        asked.append(blocks.max())
        assert int(blocks.max()) < (layer_length[0] - 1) // BLOCK
        return original(pool, blocks, *rest)

    def attending(layer, step, indices):
        layer_length[0] = max(step.ends)
        return attend_to(layer, step, indices)

    layer_length, attend_to = [0], OffloadedLayer.attend_to
    monkeypatch.setattr(BlockPool, "fetch_ahead", spying)
    monkeypatch.setattr(OffloadedLayer, "attend_to", attending)
    model = tiny_model("qwen3")
    for method in selecting(model, token_budget=2 * BLOCK):
        run(model, method, {"input_ids": prompt(50)}, 20, Offload(room_for(HEADS * 6), ahead=40))
    assert asked


def test_bytes_fetched_ahead_are_counted():
    """Against a simulation in sets, to the byte, in a pool that holds everything: each is fetched once."""
    model = tiny_model("qwen3")
    method = methods.Gate(bank=gates(model), token_budget=3 * BLOCK)
    here: dict[int, set[tuple[int, int]]] = {0: set(), 1: set()}
    guessed: dict[int, set[tuple[int, int]]] = {0: set(), 1: set()}
    counted = {"fetched": 0, "ahead": 0, "used": 0}
    original = OffloadedLayer.attend_to

    def spying(layer, step, indices):
        known, unread = here[layer.layer], guessed[layer.layer]
        chosen = {(head, int(b)) for head, row in enumerate(indices[0]) for b in row if b >= 0}
        counted["fetched"] += len(chosen - known)
        counted["used"] += len(chosen & unread)
        known |= chosen
        unread -= chosen
        for head in range(HEADS):
            past = [b for b in range((step.ends[0] - 1) // BLOCK) if (head, b) not in chosen]
            best = sorted(past, key=lambda b: -float(step.scores_BKN[0, head, b]))[:3]
            new = {(head, b) for b in best} - known
            counted["fetched"] += len(new)
            counted["ahead"] += len(new)
            known |= new
            unread |= new
        return original(layer, step, indices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OffloadedLayer, "attend_to", spying)
        _, _, stats, _ = run(model, method, {"input_ids": prompt(150)}, 30, Offload(room_for(200), ahead=3))
    steps = stats["steps"]
    assert stats["bytes_fetched_per_step"] * steps == pytest.approx(counted["fetched"] * BLOCK_BYTES)
    assert stats["bytes_fetched_ahead_per_step"] * steps == pytest.approx(counted["ahead"] * BLOCK_BYTES)
    assert stats["fetched_ahead_used"] == pytest.approx(counted["used"] / counted["ahead"])
    assert 0 < counted["used"] < counted["ahead"] < counted["fetched"]


def a_pool(slots: int) -> tuple[BlockPool, list[torch.Tensor]]:
    """Of one row, two KV heads, six blocks of four tokens."""
    stored = [torch.arange(2 * 6 * 4 * dim).float().view(2, 6, 4 * dim) for dim in (2, 3)]
    return BlockPool(slots, 1, 2, 4, 2, 3, torch.float32, torch.device("cpu")), stored


def held(pool: BlockPool) -> set[tuple[int, int]]:
    return {divmod(owner, 6) for owner in pool._owner.tolist() if owner >= 0}


def test_what_is_fetched_ahead_takes_the_place_of_what_was_read_longest_ago():
    pool, stored = a_pool(6)
    background = Background()

    def step(selected, likely):
        before = pool.fetched
        pool.locate(torch.tensor(selected), *stored)
        on_demand = pool.fetched - before
        pool.fetch_ahead(torch.tensor(likely), *stored, background)
        pool.settle()
        for pair, block in held(pool):
            slot = int(pool._slot_of[pair, block])
            assert torch.equal(pool.keys[slot].flatten(), stored[0][pair, block])
            assert torch.equal(pool.values[slot].flatten(), stored[1][pair, block])
        return on_demand

    assert step([[0], [0]], [[1, 2], [1, -1]]) == 2
    assert held(pool) == {(0, 0), (1, 0), (0, 1), (0, 2), (1, 1)} and (pool.ahead, pool.used) == (3, 0)
    assert step([[1], [3]], [[-1, -1], [-1, -1]]) == 1  # (0, 1) is used; (1, 3) takes the empty slot
    assert held(pool) == {(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (1, 3)} and (pool.ahead, pool.used) == (3, 1)
    # Guesses that no step has read go first: (0, 2) or (1, 1), before (0, 0) and (1, 0), which were read longest ago.
    assert step([[5], [3]], [[-1, -1], [-1, -1]]) == 1
    assert {(0, 0), (1, 0), (0, 1), (1, 3), (0, 5)} < held(pool)
    # A likely block that is here stays, though read longest ago; the best of each head come before the second ones.
    assert step([[5], [3]], [[0, 4, 3], [4, 5, 1]]) == 0
    assert held(pool) == {(0, 5), (1, 3), (0, 0), (1, 4), (0, 4), (1, 5)}
    # No room but that of the step itself: nothing is fetched ahead.
    ahead = pool.ahead
    assert step([[0, 1, 2], [0, 1, 2]], [[3, 4], [3, 4]]) == 5
    assert held(pool) == {(pair, block) for pair in (0, 1) for block in (0, 1, 2)} and pool.ahead == ahead


def test_what_is_written_meanwhile_is_not_lost():
    """A block that is on its way is written to, or forgotten, in the pool itself and in a layer."""
    pool, stored = a_pool(6)
    pool.locate(torch.tensor([[0], [0]]), *stored)
    pool.fetch_ahead(torch.tensor([[1], [1]]), *stored, Torn())
    pool.put(torch.tensor([6]), torch.full((2, 2), -1.0), torch.full((2, 3), -1.0))
    found = pool.keys[pool._slot_of[:, 1], 0].flatten(1)
    stored[0][:, 1, 2 * 2 : 3 * 2] = -1.0
    assert torch.equal(found, stored[0][:, 1])
    pool.fetch_ahead(torch.tensor([[2], [2]]), *stored, Torn())
    slots = pool._slot_of[:, 2].clone()
    pool.forget(0, 8, 12)
    pool.keys[slots] = torch.nan  # whoever has a slot next
    assert (0, 2) not in held(pool)
    pool.locate(torch.tensor([[-1], [-1]]), *stored)
    assert pool.keys[slots].isnan().all()

    model, original, stores = tiny_model("qwen3"), GatedLayer._store, []

    def storing(layer, *rest):
        stores.append(layer.pool._coming)
        original(layer, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GatedLayer, "_store", storing)
        method = methods.Gate(bank=gates(model), token_budget=2 * BLOCK)
        run(model, method, {"input_ids": prompt(60)}, 4, ahead_on(Later(), HEADS * 6))
    assert stores == [None] * 8


@pytest.mark.parametrize("failing", range(4))
def test_a_failed_guess_is_told_and_changes_nothing(monkeypatch, failing):
    """In the first layer, and in the second, which comes when the first has stored the next token."""
    model = tiny_model("qwen3")
    method = methods.Gate(bank=gates(model), token_budget=2 * BLOCK)
    original, copies = block_pool._copy_aside, []

    def copying(*args):
        copies.append(threading.current_thread())
        if len(copies) == failing + 1:
            raise OSError("the disk is gone")
        original(*args)

    with torch.no_grad(), seergate.attached(model, method):
        cache = DynamicCache()
        model(input_ids=prompt(60), past_key_values=cache)
        want = [model(input_ids=prompt(1, i), past_key_values=cache).logits for i in range(6)]
    monkeypatch.setattr(block_pool, "_copy_aside", copying)
    with torch.no_grad(), seergate.attached(model, method, offload=Offload(room_for(HEADS * 6), ahead=3)) as handle:
        cache = DynamicCache()
        model(input_ids=prompt(60), past_key_values=cache)
        with pytest.warns(RuntimeWarning, match="could not be fetched ahead .OSError: the disk is gone") as told:
            found = [model(input_ids=prompt(1, i), past_key_values=cache).logits for i in range(6)]
        check_pools(cache)
        assert handle.stats()["fetched_ahead_used"] > 0
    assert len(told) == 1 and len(copies) > 4
    assert all(torch.equal(*pair) for pair in zip(found, want, strict=True))


@pytest.fixture
def two_cores():
    cores = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(cores)


def test_an_error_of_the_thread_and_work_that_it_has_not_begun(two_cores):
    background, begun, go = Background(), threading.Event(), threading.Event()
    threads = []

    def fails():
        threads.append(threading.current_thread())
        begun.set()
        go.wait(30)
        raise ValueError("from the thread")

    first = background.start(fails)
    assert begun.wait(30)
    second = background.start(lambda: threads.append(threading.current_thread()))
    second.finish()  # not begun, as the thread is busy: done here
    go.set()
    with pytest.raises(ValueError, match="from the thread"):
        first.finish()
    begun.clear()
    last = background.start(lambda: begun.set() or threads.append(torch.get_num_threads()))
    assert begun.wait(30)  # on the thread, then
    last.finish()
    assert threads[0] is not threading.main_thread() and threads[1] is threading.main_thread()
    assert threads[2] == 1 and torch.get_num_threads() == 2  # its own number of cores only


def threads_of_ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("seergate background")]


def test_the_thread_ends_with_what_it_serves():
    before = set(threads_of_ours())
    model = tiny_model("qwen3")
    run(model, methods.Gate(bank=gates(model), token_budget=16), {"input_ids": prompt(60)}, 4, Offload(room_for(16)))
    assert set(threads_of_ours()) <= before  # nothing is fetched ahead, so no thread is started
    offload = Offload(room_for(16), ahead=2)
    method = methods.Gate(bank=gates(model), token_budget=16)
    cache = run(model, method, {"input_ids": prompt(60)}, 4, offload)[3]
    (thread,) = set(threads_of_ours()) - before
    twin, again = copy.deepcopy(offload), pickle.loads(pickle.dumps(offload))
    assert twin == again == offload and twin.background is not offload.background is not again.background
    pools = [copy.deepcopy(layer.pool) for layer in cache.layers]  # the last step's guesses were on their way
    assert all(torch.equal(pool._owner, layer.pool._owner) for pool, layer in zip(pools, cache.layers, strict=True))
    del offload, cache
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_process_fetches_with_a_thread_of_its_own():
    """Also what its parent's thread was doing when it was forked."""
    pool, stored = a_pool(6)
    background, begun, go, parent = Background(), threading.Event(), threading.Event(), os.getpid()
    pool.locate(torch.tensor([[0], [0]]), *stored)
    running = background.start(lambda: begun.set() or (os.getpid() == parent and go.wait(30)))  # the thread is busy
    assert begun.wait(30)
    pool.fetch_ahead(torch.tensor([[1, 2], [3, 4]]), *stored, background)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads, which this is about
        child = os.fork()
    if child == 0:
        right = False
        try:
            signal.alarm(60)  # rather than wait for ever
            running.finish()
            pool.settle()
            right = all(
                torch.equal(pool.keys[pool._slot_of[pair, block]].flatten(), stored[0][pair, block])
                for pair, block in held(pool)
            )
            done = []
            job = background.start(lambda: done.append(threading.current_thread()))
            for _ in range(1000):
                if done:
                    break
                time.sleep(0.01)
            job.finish()
            right = right and len(held(pool)) == 6 and done[0] is not threading.main_thread()
        finally:
            os._exit(0 if right else 1)
    go.set()
    running.finish()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pool.settle()
    assert len(held(pool)) == 6 and not pool.keys.isnan().any()
