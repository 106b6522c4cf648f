"""Every evicting method: what all must hold, and token for token what a simulation of its paper's equations gives."""

import copy
import itertools
from contextlib import nullcontext

import pytest
import torch
from transformers import DynamicCache

import seergate
from seergate import SeergateError
from seergate.cache.batching import join_rows, keep_rows
from seergate.methods import BudgetedState, rpc, scoring, snapkv
from seergate.methods.kv4bit import KV4BitState
from seergate.methods.raas import RaaSState
from seergate.methods.rpc import RPCState
from seergate.methods.scoring import TILE
from seergate.methods.streaming_llm import StreamingState
from tests.support.decoding import Decoding, forced_run
from tests.support.evictors import EVICTORS, GROUPS, model_of
from tests.support.models import left_padded, prompt, tiny_model
from tests.support.naive import Simulation

NAMES = list(EVICTORS)
KINDS = {name: "gate" if name.endswith("and gate") else name.split(" ")[0] for name in NAMES}
"""What each row is a variant of."""
PROMPTS = (40, 9, 23)
"""Lengths: longer than the budget of 24, shorter, and such that the first generated tokens fill it up."""
ROWS = [prompt(length, seed) for seed, length in enumerate(PROMPTS)]
EACH = list({kind: name for name, kind in reversed(KINDS.items())}.values())
"""The first row of each method; its variants keep the same tensors."""
FEW = [*EACH, "streaming_llm original"]
"""These, and the variant with attention of its own."""


def spread(values, names=NAMES):
    """Every row with one of the values in turn, so that each value meets many methods."""
    return list(zip(names, itertools.cycle(values), strict=False))


def forced_tokens(steps, rows=3):
    """Of so many rows, none of them a prompt."""
    return torch.cat([prompt(steps, 100 + seed) for seed in range(rows)])


def against_simulation(name, group, steps, lengths=PROMPTS):
    model = model_of(group, torch.float64)
    rows = [prompt(length, seed) for seed, length in enumerate(lengths)]
    forced = forced_tokens(steps, len(rows))
    logits, cache, _ = forced_run(model, EVICTORS[name].method(model), rows, forced)
    for row, ids in enumerate(rows):
        policy = EVICTORS[name].policy(model)
        stored = getattr(policy, "stored", None)  # of policies whose cache holds something else than keys after RoPE
        with Simulation(model, policy) as simulation, torch.inference_mode():
            expected = simulation.logits(ids, forced[row])
        assert torch.equal(logits[row].argmax(-1), expected.argmax(-1))
        torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-4)
        for index, past in simulation.layers.items():
            layer = cache.layers[index]
            assert past.alive.sum(1).tolist() == [layer.rows.resident[row]] * len(past.alive)
            for head, alive in enumerate(past.alive):
                kept = torch.from_numpy(stored(past, head) if stored else past.keys[alive, head])
                torch.testing.assert_close(layer.keys[row, head, : len(kept)], kept, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "group"), spread(GROUPS))
def test_against_a_simulation_that_keeps_everything(name, group):
    """In a ragged batch of three, logits at every step and at the end the very keys that are kept."""
    against_simulation(name, group, 50)


@pytest.mark.parametrize("name", ["h2o", "h2o in batches", "r_kv"])
def test_a_prompt_of_several_tiles_against_a_simulation(name):
    """A prompt is compared with itself `TILE` rows at a time: here in two tiles and a part, in one, and in two."""
    against_simulation(name, 4, 6, (2 * TILE + 44, TILE, TILE + 1))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
def test_against_a_simulation_for_500_steps(name):
    """With a prompt above the budget and one below."""
    against_simulation(name, 4, 500, PROMPTS[:2])


@pytest.fixture
def steps_seen(monkeypatch):
    """(state, step, whether autocast is on) of every step that reaches `select_kept`, right after its attention."""
    seen = []
    for kind in {BudgetedState, RaaSState, RPCState, KV4BitState, StreamingState}:

        def spied(self, step, select_kept=kind.select_kept):
            seen.append((self, step, torch.is_autocast_enabled("cpu")))
            return select_kept(self, step)

        monkeypatch.setattr(kind, "select_kept", spied)
    return seen


@pytest.mark.parametrize(("name", "group"), spread(GROUPS, FEW))
def test_a_budget_for_everything_is_the_plain_model(name, group):
    """Invariants 1 and 6: equal to dense attention at every step, alone and in a batch, twice."""
    model = model_of(group)
    for rows in ([prompt(21, 4)], ROWS):
        forced = forced_tokens(30, len(rows))
        plain, _, _ = forced_run(model, "dense", rows, forced)
        method = EVICTORS[name].covers(model)
        for _ in range(2):
            logits, cache, _ = forced_run(model, method, rows, forced)
            torch.testing.assert_close(logits, plain, rtol=2e-4, atol=2e-4)
        assert cache.layers[0].rows.resident == [row.shape[1] + 30 for row in rows]


@pytest.mark.parametrize("name", EACH)
def test_autocast_does_not_round_what_decides(name, steps_seen, monkeypatch):
    """The products of the model are in bfloat16, those of the method in float32, also after a prompt."""
    products, model = [], model_of(4)

    def logits(*args, original=scoring.logits):
        products.append(original(*args))
        return products[-1]

    for module in (scoring, snapkv, rpc):
        monkeypatch.setattr(module, "logits", logits)
    with seergate.attached(model, EVICTORS[name].method(model)), torch.autocast("cpu", torch.bfloat16):
        assert model.generate(prompt(40), max_new_tokens=12).shape == (1, 52)
    assert steps_seen and not any(autocast for _, _, autocast in steps_seen)
    assert all(product.dtype == torch.float32 for product in products)
    assert products or name.split()[0] not in ("snapkv", "r_kv", "tova", "h2o")


@pytest.mark.parametrize("name", EACH)
def test_a_state_holds_no_graph_where_gradients_are_on(name):
    model = model_of(4).requires_grad_(True)
    with seergate.attached(model, EVICTORS[name].method(model)):
        cache = model(prompt(40), use_cache=True).past_key_values
        for _ in range(8):
            model(prompt(1), past_key_values=cache, use_cache=True)
        states = [state for layer in cache.layers for state in (layer.state, *layer.state.parts)]
        assert not any(tensor.requires_grad for state in states for tensor in state.rows.values())
        copy.deepcopy(cache)


def places_in_order(kept, came):
    """Where in ``came [N, D]`` the keys ``kept [T, D]`` stand, bit for bit and ascending; of equal keys (one token
    twice, before RoPE) the latest that leaves room for those that follow.
    """
    places, end = [], len(came)
    for key in kept.flip(0):
        same = (came[:end] == key).all(-1).nonzero()
        assert len(same), "a resident is none of the keys that came, or out of order"
        end = same[-1].item()
        places.insert(0, end)
    return places


@pytest.mark.parametrize(("name", "group"), spread(GROUPS))
def test_what_is_resident(name, group, steps_seen):
    """Invariants 2, 3 and 4: the newest key is there, never more than the bound, and all bit for bit as they came."""
    model, evictor = model_of(group), EVICTORS[name]
    came = {(layer, row): [] for layer in range(2) for row in range(3)}
    method = evictor.method(model)
    _, cache, _ = forced_run(model, method, ROWS, forced_tokens(40))
    assert len(steps_seen) == 2 * 41
    for state, step, _ in steps_seen:
        for row, (start, count) in enumerate(zip(step.starts, step.counts, strict=True)):
            new = (step.k_pre_BKSD if method.stores_pre_rope else step.k_BKSD)[row, :, :count]
            came[state.spec.layer, row] += list(new.unbind(1))
            decoded = len(came[state.spec.layer, row]) - PROMPTS[row]
            if decoded:
                assert start + count <= evictor.bound(PROMPTS[row], decoded)
    for (index, row), keys in came.items():
        layer, keys = cache.layers[index], torch.stack(keys, 1)
        length = layer.rows.resident[row]
        assert length < len(keys[0]), "something must have been evicted"
        for head in range(len(keys)):
            places = places_in_order(layer.keys[row, head, :length], keys[head])
            assert places[-1] == len(keys[0]) - 1 or "faithful" in name
            if evictor.pins_prompt:
                assert places[: PROMPTS[row]] == list(range(PROMPTS[row]))


@pytest.mark.parametrize("length", [1, 24, 25, 100])
@pytest.mark.parametrize("name", EACH)
def test_prompts_of_any_length(name, length):
    """Invariant 7, in half precision."""
    model = model_of(4, torch.bfloat16)
    with seergate.attached(model, EVICTORS[name].method(model)) as handle:
        assert model.generate(input_ids=prompt(length), max_new_tokens=30).shape == (1, length + 30)
        assert 0 < handle.stats()["density"] <= 1


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2"])
@pytest.mark.parametrize("name", FEW)
def test_attention_sinks_and_capped_scores(name, family):
    """The plain model if nothing is evicted; if something is, a row is the same alone and in a batch."""
    model, rows = tiny_model(family), [prompt(30, 1), prompt(7, 2)]
    plain = model.generate(**left_padded(rows), max_new_tokens=30)
    with seergate.attached(model, EVICTORS[name].covers(model)):
        assert torch.equal(model.generate(**left_padded(rows), max_new_tokens=30), plain)
    with seergate.attached(model, EVICTORS[name].method(model)):
        together = model.generate(**left_padded(rows), max_new_tokens=30)
        for i, row in enumerate(rows):
            alone = model.generate(input_ids=row, max_new_tokens=30)
            assert torch.equal(alone[0, row.shape[1] :], together[i, 30:])


@pytest.mark.parametrize("name", EACH)
def test_on_a_static_cache(name):
    model, batch = model_of(4, attn_implementation="eager"), left_padded([prompt(30, 1), prompt(7, 2)])
    with seergate.attached(model, EVICTORS[name].method(model)):
        dynamic = model.generate(**batch, max_new_tokens=30)
        assert torch.equal(model.generate(**batch, max_new_tokens=30, cache_implementation="static"), dynamic)


@pytest.mark.parametrize("name", EACH)
def test_rows_that_come_and_go(name):
    """A row that joins others after some steps, and goes on when they have left, gives what it gives alone."""
    model = model_of(4)
    method = EVICTORS[name].method(model)
    forced = forced_tokens(60)
    alone = [forced_run(model, method, [row], forced[i : i + 1])[0][0] for i, row in enumerate(ROWS)]
    begins, ends = (0, 13, 26), (45, 60, 60)  # the steps at which each row joins and leaves
    running, cache = [], None
    with seergate.attached(model, method), torch.inference_mode():
        for now in range(70):
            staying = [row for row in running if now - begins[row] < ends[row]]
            if staying != running and staying:
                keep_rows(cache, [running.index(row) for row in staying])
            running = staying
            if now in begins:
                row, own = begins.index(now), DynamicCache()
                out = model(input_ids=ROWS[row], past_key_values=own).logits[0, -1]
                torch.testing.assert_close(out, alone[row][0], rtol=1e-4, atol=1e-4)
                if cache is None:
                    cache = own
                else:
                    join_rows(cache, own)
                running = [*running, row]
            places = [now - begins[row] for row in running]
            ids = torch.stack([forced[row, place : place + 1] for row, place in zip(running, places, strict=True)])
            positions = torch.tensor([[PROMPTS[row] + place] for row, place in zip(running, places, strict=True)])
            out = model(input_ids=ids, position_ids=positions, past_key_values=cache).logits[:, -1]
            for i, (row, place) in enumerate(zip(running, places, strict=True)):
                torch.testing.assert_close(out[i], alone[row][place + 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", EACH)
def test_memory_is_flat_and_stays_where_it_is(name):
    """Once the budget is reached neither the cache nor a state grows, and the cache's buffers are not replaced."""
    model, layer_bytes, places = model_of(4), [], set()

    def note(step, cache, handle):
        layer = cache.layers[1]
        layer_bytes.append(layer.nbytes)
        if step > 60:
            places.add(layer.keys.data_ptr())

    forced = prompt(160, 9)
    _, cache, _ = forced_run(model, EVICTORS[name].method(model), [prompt(100)], forced, each=note)
    layer, bound = cache.layers[1], EVICTORS[name].bound(100, 160)
    if name.startswith("rpc"):
        assert layer.keys.shape[2] == 100 + 12 * 3 + 4 + 12, "until the 13th compression, which was just now"
        assert len(set(layer_bytes[60:])) == 10, "one step up per compression, from the 4th to the 13th"
        return
    assert (len(set(layer_bytes[60:])) == 1 or EVICTORS[name].grows) and len(places) == 1
    assert layer.keys.shape[2] <= bound + 3, "a page is not split"
    assert layer_bytes[0] >= layer.keys[..., :100, :].nbytes * 2


def test_a_decoded_token_that_is_masked_is_refused():
    """Methods remember every decoded token's query; a padding one would be taken for the row's."""
    model = model_of(4)
    batch = left_padded([prompt(20, 1), prompt(13, 2)])
    mask = torch.cat((batch["attention_mask"], torch.tensor([[1], [0]])), 1)
    refused = pytest.raises(SeergateError, match=r"hides the token that row 1 decodes, and 'h2o' counts every")
    for name, outcome in (("h2o", refused), ("quest", nullcontext())):
        cache = DynamicCache()
        with seergate.attached(model, name, token_budget=64), torch.inference_mode():
            model(**batch, past_key_values=cache)
            with outcome:
                model(prompt(1).expand(2, 1), attention_mask=mask, past_key_values=cache)
    assert cache.layers[0].rows.resident == [21, 13]


@torch.inference_mode()
def test_padded_prompts_that_come_token_by_token():
    """Whose first token is padding in one row."""
    model, short = model_of(4), prompt(13, 2)
    batch = left_padded([prompt(20, 1), short])
    with seergate.attached(model, "h2o", token_budget=8):
        alone, rows = [Decoding(model, ids[:, :1], mask[:, :1]) for ids, mask in ((short, short > 0), batch.values())]
        for each, ids, mask in ((alone, short, short > 0), (rows, *batch.values())):
            for i in range(1, ids.shape[1]):
                each.read(ids[:, i : i + 1], mask[:, i : i + 1])
    torch.testing.assert_close(rows.logits[1], alone.logits[0], rtol=1e-4, atol=1e-4)
