"""ReasonCache while decoding: what it saves, what it leaves alone, and an evaluator that fails."""

import gc
import weakref
from itertools import count

import pytest
import torch
from transformers import DynamicCache

import seergate
from seergate import Paging, methods
from seergate.cache.batching import join_rows, keep_rows
from seergate.methods.reason_cache.evaluator import Evaluator
from tests.decode.test_decode import gates
from tests.support.decoding import Decoding, forced_run
from tests.support.models import left_padded, prompt, tiny_model
from tests.support.reasoning import Words, repeating
from tests.support.running import refused, run_script
from tests.test_benchmarks import record_of

PROMPTS = [prompt(11, 1), prompt(5, 2)]
PAGE = 4
QUEST = methods.Quest(token_budget=8 * PAGE, block_size=PAGE, dense_layers=())
WARNED = pytest.mark.filterwarnings("ignore:reason_cache shares no more blocks:RuntimeWarning")
READS = pytest.mark.parametrize("reads", [None, QUEST], ids=["all", "quest"])


def reason(kind=methods.ReasonCache, **options):
    return kind(**{"tokenizer": Words(), "block_size": PAGE, "warm_up": 2, **options})


def looping(rows=2, length=12):
    """The first row repeats one step seven times, the others never repeat one."""
    return torch.cat([repeating(7, length, seed, fresh=range(7) if seed else ()) for seed in range(rows)])


@pytest.mark.parametrize(
    ("options", "selects"),
    [({"percentile": 0}, True), ({"warm_up": 10**6}, False), ({"strict": 1.0, "soft": 1.0}, False)],
)
def test_where_nothing_is_shared_nothing_changes(model, options, selects):
    """To the last bit the plain cache; dense, and under a method that selects."""
    quest = {"token_budget": 16, "block_size": PAGE, "dense_layers": ()}
    reads = methods.Quest(**quest) if selects else None
    plain, _, _ = forced_run(model, reads or methods.Dense(), PROMPTS, looping())
    kept, _, stats = forced_run(model, reason(reads=reads, **options), PROMPTS, looping())
    assert torch.equal(plain, kept)
    assert stats["sharing"]["amsr"] == 0 and stats["sharing"]["physical_peak"] == stats["sharing"]["logical_peak"]
    assert stats["sharing"]["steps"] == 12, "the last tokens are told of when the next ones come"


def test_repeats_share_blocks_and_other_rows_do_not_notice(model):
    plain, contiguous, _ = forced_run(model, "dense", PROMPTS, looping())
    tables = []

    def watch(at, cache, handle):
        tables.append([list(row.table) for row in cache.layers[0].storage.pages.rows])

    shared, cache, stats = forced_run(model, reason(), PROMPTS, looping(), each=watch)
    counts, store = stats["sharing"], cache.layers[0].storage.pages
    assert counts["error"] is None
    assert torch.equal(plain[1], shared[1]), "the row that never repeats itself is as it would be alone, to the bit"
    assert torch.equal(plain[0, :25], shared[0, :25]), "nothing before the first repeat"
    assert not torch.equal(plain[0], shared[0])
    assert all(len(set(pages)) == len(pages) for _, pages in tables), "nor is anything of it shared"
    saved = counts["shared_blocks"]
    assert store.logical - store.physical == saved == store.rows[0].repeats >= 4
    assert counts["logical_peak"] == sum(-(-(len(p[0]) + 83) // PAGE) for p in PROMPTS)
    assert 0 < counts["amsr"] < saved / counts["logical_peak"]
    assert stats["method"] == "reason_cache"
    per_block = 2 * PAGE * 16 * 4 * 2
    assert all(layer.nbytes == store.physical * per_block for layer in cache.layers)
    for i in range(store.rows[0].length // PAGE):
        if store.rows[0].table.index(store.rows[0].table[i]) == i:  # not shared
            keys = [each.layers[0].keys[0, :, i * PAGE : (i + 1) * PAGE] for each in (cache, contiguous)]
            torch.testing.assert_close(*keys)
    again, _, _ = forced_run(model, reason(), PROMPTS, looping())
    assert torch.equal(shared, again)
    alone, _, _ = forced_run(model, reason(), PROMPTS[:1], looping()[:1])
    torch.testing.assert_close(alone[0], shared[0], rtol=1e-4, atol=1e-4)


def test_what_is_known_of_a_block_follows_it():
    """Gate and Quest: the summary of a replaced block is that of the block in its place; pages of two blocks."""
    model, text = tiny_model("qwen3"), repeating(5, 40)
    for reads, names in (
        (methods.Gate(bank=gates(model, 8), token_budget=32), ["kg"]),
        (methods.Quest(token_budget=32, block_size=8, dense_layers=()), ["high", "low"]),
    ):
        _, cache, stats = forced_run(model, reason(reads=reads, block_size=16, warm_up=0), PROMPTS[:1], text)
        table = cache.layers[0].storage.pages.rows[0].table
        copies = [(i, table.index(block)) for i, block in enumerate(table) if table.index(block) != i]
        assert len(copies) == stats["sharing"]["shared_blocks"] >= 2
        assert stats["method"] == f"reason_cache+{reads.name}" and stats["density"] < 0.6
        for layer in cache.layers:
            for name in names:
                rows = layer.state.rows[name][0]
                for newer, older in copies:
                    assert torch.equal(rows[:, 2 * newer : 2 * newer + 2], rows[:, 2 * older : 2 * older + 2])


def test_selecting_everything_of_shared_blocks_is_reading_all_of_them(model):
    gate, text = methods.Gate(bank=gates(model, 8), threshold=1e-30), looping(2, 20)
    selecting, _, stats = forced_run(model, reason(reads=gate, block_size=8), PROMPTS, text)
    dense, _, _ = forced_run(model, reason(block_size=8), PROMPTS, text)
    assert stats["density"] == 1 and stats["sharing"]["shared_blocks"] > 3
    torch.testing.assert_close(selecting, dense, rtol=1e-4, atol=1e-4)


def test_stock_ways_of_generating(model):
    """Beams, drafts that are taken back, and several samples of a prompt, all of them while blocks are shared."""
    text = torch.cat((prompt(5, 2), repeating(4, 12)), 1)
    for options in (
        {"num_beams": 3, "do_sample": False},
        {"prompt_lookup_num_tokens": 4, "do_sample": False},
        {"num_return_sequences": 3, "do_sample": True},
    ):
        with seergate.attached(model, reason(include_prompt=True, warm_up=0)) as handle:
            out = model.generate(input_ids=text, max_new_tokens=24, pad_token_id=0, **options)
            counts = handle.stats()["sharing"]
        assert out.shape[1] == text.shape[1] + 24
        assert counts["error"] is None and counts["shared_blocks"] >= 3


def test_a_prompt_in_chunks_is_no_reasoning(model):
    """However often it repeats itself; the last chunk has one token."""
    for chunk in (None, 83, 17):
        with seergate.attached(model, reason(warm_up=0, percentile=100)) as handle:
            model.generate(repeating(7, 12), max_new_tokens=4, prefill_chunk_size=chunk, do_sample=False)
            counts = handle.stats()["sharing"]
        assert counts["shared_blocks"] == 0 and counts["error"] is None and "steps" not in counts


@READS
def test_rows_that_come_and_go(model, reads):
    """A row that joins another, and stays when that one leaves, shares what it shares alone; so does the other."""
    texts = [repeating(7, 12), repeating(7, 12, 5)]
    alone = [forced_run(model, reason(reads=reads), [p], text) for p, text in zip(PROMPTS, texts, strict=True)]
    logits_by_row: list[list[torch.Tensor]] = [[], []]
    with seergate.attached(model, reason(reads=reads)) as handle, torch.inference_mode():

        def step(cache, ids, rows, seen):
            at = torch.tensor(seen)[:, None] + torch.arange(ids.shape[1])
            out = model(input_ids=ids, position_ids=at, past_key_values=cache)
            for row, logits in zip(rows, out.logits, strict=True):
                logits_by_row[row].append(logits[-1])

        running, arriving = DynamicCache(), DynamicCache()
        step(running, PROMPTS[0], [0], [0])
        for i in range(50):
            step(running, texts[0][:, i : i + 1], [0], [11 + i])
        step(arriving, PROMPTS[1], [1], [0])
        join_rows(running, arriving)
        for i in range(34):
            ids = torch.cat((texts[0][:, 50 + i], texts[1][:, i]))[:, None]
            step(running, ids, [0, 1], [61 + i, 5 + i])
        keep_rows(running, [1])
        for i in range(34, 84):
            step(running, texts[1][:, i : i + 1], [1], [5 + i])
        counts = handle.stats()["sharing"]
    for (expected, _, _), logits in zip(alone, logits_by_row, strict=True):
        torch.testing.assert_close(torch.stack(logits), expected[0], rtol=1e-4, atol=1e-4)
    shared = [stats["sharing"]["shared_blocks"] for _, _, stats in alone]
    assert min(shared) >= 4 and counts["shared_blocks"] == sum(shared)
    assert counts["error"] is None


def test_a_fork_of_a_row_in_which_a_step_has_just_ended(model):
    """The fork shares the step's blocks as the row does, and those of a third repetition."""
    text, other = repeating(3, 12), prompt(12, 9)
    with seergate.attached(model, reason(warm_up=0, percentile=100)) as handle, torch.inference_mode():
        cache = DynamicCache()
        model(input_ids=PROMPTS[0], past_key_values=cache)
        with handle.passes.forced("decode"):
            model(input_ids=text[:, :24], past_key_values=cache)
        cache.reorder_cache(torch.tensor([0, 0]))
        for ids in torch.cat((text[:, 24:], other), 1).expand(2, -1).split(1, 1):
            model(input_ids=ids, past_key_values=cache)
        counts, rows = handle.stats()["sharing"], cache.layers[0].storage.pages.rows
    first, fork = ([row.table.index(block) for block in row.table] for row in rows)
    assert first == fork and rows[0].repeats == rows[1].repeats >= 4
    assert counts["shared_blocks"] == 2 * rows[0].repeats


def test_a_draft_that_is_taken_back_leaves_no_trace(model):
    """The steps that end in it are forgotten before they are compared with others."""
    text, draft, results = looping(1), torch.cat((looping(1)[:, :12], prompt(5, 9)), 1), []
    for astray in (False, True):
        with seergate.attached(model, reason()) as handle, torch.inference_mode():
            rows, logits = Decoding(model, PROMPTS[0]), []
            for i in range(text.shape[1]):
                if astray and i in (24, 40):
                    rows.read(draft)
                    rows.crop(draft.shape[1])
                logits.append(rows.read(text[:, i : i + 1]))
            counts, store = handle.stats()["sharing"], rows.cache.layers[0].storage.pages
        results.append((torch.cat(logits), [row.table.index(b) for row in store.rows for b in row.table]))
        assert counts["shared_blocks"] >= 4 and counts["steps"] == 6
    assert torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]


@WARNED
def test_a_cache_that_is_dropped_leaves_nothing(model):
    """Its memory is free at once, without the garbage collector; also where an error has ended sharing."""
    gc.disable()
    try:
        for failing in (False, True):
            with seergate.attached(model, reason()), torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
                if failing:
                    spoilt(patch, 5)
                cache = DynamicCache()
                for i in range(20):
                    model(input_ids=looping(1)[:, i : i + 1], past_key_values=cache)
                layer = weakref.ref(cache.layers[0])
                del cache
                assert layer() is None
    finally:
        gc.enable()


def spoilt(monkeypatch, after, error=RuntimeError):
    """Let the evaluator fail after so many calls."""
    calls = count()

    def failing(original):
        def call(*given):
            if next(calls) >= after:
                raise error("out of its mind")
            return original(*given)

        return call

    for name in ("tokens_came", "to_share"):
        monkeypatch.setattr(Evaluator, name, failing(getattr(Evaluator, name)))


def test_an_error_ends_sharing_and_not_decoding(model, monkeypatch):
    """One warning; decoding goes on, and is the plain one if nothing had been shared."""
    plain, _, _ = forced_run(model, "dense", PROMPTS, looping())
    spoilt(monkeypatch, 5)
    with pytest.warns(RuntimeWarning, match="reason_cache shares no more blocks: out of its mind") as records:
        logits, _, stats = forced_run(model, reason(), PROMPTS, looping())
    assert sum(warning.category is RuntimeWarning for warning in records) == 1 and torch.equal(plain, logits)
    assert stats["sharing"]["error"] == "out of its mind" and not stats["sharing"]["shared_blocks"]


def test_an_interrupt_is_the_callers(model, monkeypatch):
    spoilt(monkeypatch, 5, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        forced_run(model, reason(), PROMPTS, looping())


def test_an_error_between_the_layers_of_a_shared_block_ends_decoding(model, monkeypatch):
    """The layers after it would still select the block by what it held before."""

    def failing(*given):
        raise RuntimeError("no memory")

    monkeypatch.setattr(methods.LayerState, "block_shared", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        forced_run(model, reason(), PROMPTS, looping())


@WARNED
def test_an_error_that_comes_late_leaves_what_is_shared(model, monkeypatch):
    whole, _, _ = forced_run(model, reason(), PROMPTS, looping())
    spoilt(monkeypatch, 120)
    logits, _, stats = forced_run(model, reason(), PROMPTS, looping())
    assert stats["sharing"]["shared_blocks"] > 0
    same = [torch.equal(a, b) for a, b in zip(logits[0], whole[0], strict=True)]
    assert not all(same) and same == sorted(same, reverse=True), "equal up to where it failed"
    assert torch.equal(logits[1], whole[1])


def test_the_control_saves_as_much(model):
    _, _, informed = forced_run(model, reason(), PROMPTS, looping())
    _, cache, control = forced_run(model, reason(methods.RandomSharing), PROMPTS, looping())
    drawn, store = control["sharing"]["shared_blocks"], cache.layers[0].storage.pages
    assert drawn == store.logical - store.physical
    assert drawn == pytest.approx(informed["sharing"]["shared_blocks"], rel=0.35)


@pytest.mark.soak
def test_the_tiny_reasoner_recalls_its_values(tmp_path):
    """It goes through its first steps again and again. ReasonCache keeps every value that a later step needs; random
    sharing of as many blocks loses some.
    """
    options = "--threads 1 --problems 3 --rounds 3 --output"
    done = run_script("benchmarks/reason_cache_accuracy.py", *options.split(), str(tmp_path))
    assert done.returncode == 0, done.stderr
    dense, informed, control, gate, both = rows = record_of(tmp_path)["rows"]
    assert [row["method"] for row in rows] == ["dense", "reason_cache", "random_sharing", "gate", "reason_cache+gate"]
    assert both["block_size"] == 8 and both["amsr"] > 0 and both["recalled"] >= gate["recalled"] - 0.02
    assert dense["recalled"] >= 0.98 and informed["recalled"] >= dense["recalled"] - 0.01
    assert informed["amsr"] > 0.05 and control["amsr"] == pytest.approx(informed["amsr"], rel=0.2)
    assert control["recalled"] < informed["recalled"] - 0.03


def test_refusals(model):
    for method, paging, message in (
        (methods.ReasonCache(), None, "needs the model's tokenizer, and none could be loaded from ''"),
        (reason(), Paging(8), "'reason_cache' makes its own pages; give block_size and max_blocks to the"),
        (reason(reads=methods.Quest(token_budget=64)), None, "pages of 4 tokens would cut the blocks of 16"),
    ):
        refused(message, seergate.attach, model, method, storage=paging)
    with seergate.attached(model, reason()):
        refused("give the model input_ids", model, inputs_embeds=torch.randn(1, 4, 64), use_cache=True)
        cache, embed = DynamicCache(), model.get_input_embeddings()
        model(prompt(42), past_key_values=cache)
        for embedded in (torch.randn(1, 10, 64), torch.cat([torch.randn(1, 3, 64), embed(prompt(7))], 1)):
            refused("give the model input_ids", model, inputs_embeds=embedded, past_key_values=cache)
            assert [row.length for row in cache.layers[0].storage.pages.rows] == [42], "a refused pass leaves no trace"
    assert model.generate(**left_padded(PROMPTS), max_new_tokens=2).shape == (2, 13)
