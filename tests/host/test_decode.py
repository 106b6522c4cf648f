"""Decoding inside stock `generate`: equal to the plain model where it must be, and to itself in any batch."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import seergate
from seergate import DecodeConfig, GateBank, GateConfig, SeergateError, methods
from seergate.cache.layer import GatedLayer
from tests.host.reasoning import Words
from tests.methods.evictors import GROUPS, model_of
from tests.models import left_padded, prompt, tiny_model

BLOCK = 8


def gates(model, block_size=BLOCK, **options):
    bank = GateBank.for_model(model, GateConfig(block_size, options.pop("gate_dim", 16), **options))
    for parameter in bank.parameters():  # wide enough that selections differ from one another
        parameter.data.normal_()
    return bank


def all_methods(model, budget):
    return [
        methods.Gate(
            bank=gates(model, gate_dim=model.get_decoder().layers[-1].self_attn.head_dim), token_budget=budget
        ),
        methods.Oracle(token_budget=budget, block_size=BLOCK),
        methods.Quest(token_budget=budget, block_size=BLOCK, dense_layers=()),
        methods.ReSA(token_budget=budget, block_size=BLOCK, rectify_every=None),
        methods.Random(token_budget=budget, block_size=BLOCK),
        methods.StreamingLLM(token_budget=budget),
        methods.Dense(),
        # on pages, its steps compared while decoding goes on, and nothing near enough to be shared
        methods.ReasonCache(
            reads=methods.Quest(token_budget=budget, block_size=BLOCK, dense_layers=()),
            **{"tokenizer": Words(), "percentile": 0, "warm_up": 0, "asynchronous": False},
        ),
    ]


METHODS = ("gate", "oracle", "quest", "resa", "random", "streaming_llm", "dense", "reason_cache")
SELECTING = ("gate", "oracle", "quest", "resa", "random")


def tokens(model, method, inputs, new=20, **options):
    with seergate.attached(model, method):
        out = model.generate(**inputs, max_new_tokens=new, return_dict_in_generate=True, output_logits=True, **options)
    return out.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(out.logits, 1)


def test_every_method_is_in_the_table():
    """Evicting methods have a table of their own; a control that shares at random has its method's row."""
    from tests.methods.evictors import EVICTORS

    evicting = {name for name, kind in methods.METHODS.items() if issubclass(kind, methods.CompressingMethod)}
    assert set(METHODS) - {"streaming_llm"} == set(methods.METHODS) - evicting - {"random_sharing"}
    assert evicting == {name.split(" ")[0] for name in EVICTORS}


def pick(model, name, budget):
    return next(method for method in all_methods(model, budget) if method.name == name)


FAMILIES = ["qwen3", "qwen2", "llama", "mistral", "gemma2", "gemma3_text", "phi3", "gpt_oss", "qwen3_5_text"]
UNLIKE = ["qwen3", "gemma3_text", "gpt_oss"]


def pairs(others, least):
    """Every method with the first of ``others`` and one more, the methods in ``least`` with all of them."""
    found = [(name, others[0]) for name in METHODS]
    found += [(name, others[1:][i % (len(others) - 1)]) for i, name in enumerate(METHODS)]
    return list(dict.fromkeys(found + [(name, other) for name in least for other in others]))


@pytest.mark.parametrize(("name", "family"), pairs(FAMILIES, ["gate"]))
def test_a_budget_for_everything_is_the_plain_model(family, name):
    """Alone and in a left-padded batch, token for token. Invariants 1, 2 and 6 of the methods."""
    model = tiny_model(family)
    batch = left_padded([prompt(13, 1), prompt(29, 2), prompt(16, 3)])
    method = pick(model, name, 4096)
    for inputs in ({"input_ids": prompt(21, 4)}, batch):
        plain = model.generate(**inputs, max_new_tokens=20, return_dict_in_generate=True, output_logits=True)
        for _ in range(2):  # the second run must find no trace of the first
            found, logits = tokens(model, method, inputs)
            assert torch.equal(found, plain.sequences[:, inputs["input_ids"].shape[1] :])
            torch.testing.assert_close(logits, torch.stack(plain.logits, 1), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(("name", "family"), pairs(UNLIKE, ["gate", "quest", "streaming_llm"]))
def test_a_row_is_the_same_alone_and_in_any_batch(family, name):
    model = tiny_model(family)
    method = pick(model, name, 2 * BLOCK)
    rows = [prompt(length, seed) for seed, length in enumerate((5, 40, 16, 33))]
    together, logits = tokens(model, method, left_padded(rows), new=24)
    for i, row in enumerate(rows):
        alone, alone_logits = tokens(model, method, {"input_ids": row}, new=24)
        assert torch.equal(alone[0], together[i])
        torch.testing.assert_close(alone_logits[0], logits[i], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(("name", "group"), pairs(list(GROUPS), ["gate", "quest"]))
def test_groups_of_any_size(name, group):
    """With a budget for everything the plain model, with a small one a row alone as in a batch, for 1, 4 and 5 query
    heads per KV head.
    """
    model = model_of(group, num_hidden_layers=1)
    rows = [prompt(length, length) for length in (5, 40, 17)]
    batch = left_padded(rows)
    plain = model.generate(**batch, max_new_tokens=12, return_dict_in_generate=True, output_logits=True)
    _, logits = tokens(model, pick(model, name, 4096), batch, new=12)
    torch.testing.assert_close(logits, torch.stack(plain.logits, 1), rtol=2e-4, atol=2e-4)
    method = pick(model, name, 2 * BLOCK)
    together, logits = tokens(model, method, batch, new=12)
    for i, row in enumerate(rows):
        alone, alone_logits = tokens(model, method, {"input_ids": row}, new=12)
        assert torch.equal(alone[0], together[i])
        torch.testing.assert_close(alone_logits[0], logits[i], rtol=2e-4, atol=2e-4)
    assert name == "dense" or (logits - torch.stack(plain.logits, 1)).abs().max() > 1e-2, "it must be sparse"


@pytest.mark.parametrize("name", [name for name in METHODS if name != "dense"])
def test_a_small_budget_does_change_the_output(name):
    """Guards the two tests above: what they compare must be really sparse."""
    model = tiny_model("qwen3")
    inputs = {"input_ids": prompt(60)}
    plain = model.generate(**inputs, max_new_tokens=8, return_dict_in_generate=True, output_logits=True)
    _, logits = tokens(model, pick(model, name, 2 * BLOCK), inputs, new=8)
    first, later = (torch.stack(plain.logits, 1) - logits).abs().amax((0, 2))[[0, 1]]
    assert first < 1e-4, "the prompt's own forward is dense"
    assert later > 1e-2


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("lengths", [(17, 15), (16, 17), (31, 16), (33, 32), (24, 41)])
def test_compressed_keys_of_prefill_and_decode_are_the_same(lengths, block_size):
    """prefill(N) = prefill(n) + decode(N - n), for n at every place of a block, in rows that end below, at and above
    a border, together and alone.
    """
    model = tiny_model("qwen3")
    rows = [prompt(length, seed) for seed, length in enumerate(lengths)]
    batch, width = left_padded(rows), max(lengths)
    first = width - min(lengths) + 1  # the shorter row has a token

    def compressed(inputs, prefill):
        cache, mask = DynamicCache(), inputs["attention_mask"]
        for begin, end in [(0, prefill), *((i, i + 1) for i in range(prefill, mask.shape[1]))]:
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, begin:end]
            ids = inputs["input_ids"][:, begin:end]
            model(input_ids=ids, attention_mask=mask[:, :end], position_ids=positions, past_key_values=cache)
        return [layer.state.rows["kg"] for layer in cache.layers]

    with seergate.attached(model, gates(model, block_size), DecodeConfig(token_budget=4096)):
        alone = [compressed(left_padded([row]), row.shape[1]) for row in rows]
        for prefill in {width, *range(first, min(first + block_size, width))}:
            for layer, found in enumerate(compressed(batch, prefill)):
                for row, length in enumerate(lengths):
                    full = length // block_size
                    expected = alone[row][layer][0, :, :full]
                    assert expected.shape[1] == full
                    torch.testing.assert_close(found[row, :, :full], expected, rtol=1e-4, atol=1e-5)


def test_chunks_of_a_prompt_are_the_whole_prompt():
    model = tiny_model("qwen3")
    ids = prompt(50)
    for name in ("gate", "quest", "oracle", "resa"):
        with seergate.attached(model, pick(model, name, 2 * BLOCK)):
            results = []
            for borders in ((0, 49), (0, 5, 16, 40, 49)):
                cache = DynamicCache()
                for a, b in zip(borders, borders[1:], strict=False):
                    model(input_ids=ids[:, a:b], past_key_values=cache)
                results.append(model(input_ids=ids[:, 49:], past_key_values=cache).logits)
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SELECTING)
def test_cropping_then_going_on_is_never_having_gone_astray(name):
    model = tiny_model("qwen3")
    method = pick(model, name, 2 * BLOCK)
    ids, astray = prompt(70, 1), prompt(30, 2)
    with seergate.attached(model, method):
        for kept in (24, 25, 31, 40):
            straight = DynamicCache()
            model(input_ids=ids[:, :kept], past_key_values=straight)
            steps = range(kept, kept + 12)
            expected = [model(input_ids=ids[:, i : i + 1], past_key_values=straight).logits for i in steps]
            for wanderings in ((30,), (30, 3, 30)) if kept == 40 else ((1,), (5,), (17,), (13, 7), (17, 3, 17)):
                cache = DynamicCache()
                model(input_ids=ids[:, :kept], past_key_values=cache)
                for wandered in wanderings:  # a later one goes less far beyond `kept` than an earlier one, or farther
                    for i in range(wandered):
                        model(input_ids=astray[:, i : i + 1], past_key_values=cache)
                    cache.crop(-wandered)
                for i, logits in zip(steps, expected, strict=True):
                    found = model(input_ids=ids[:, i : i + 1], past_key_values=cache).logits
                    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_reordering_and_selecting_rows(name):
    model = tiny_model("qwen3")
    method = pick(model, name, 2 * BLOCK)
    rows = [prompt(length, seed) for seed, length in enumerate((40, 23, 31))]
    order = torch.tensor([2, 0, 2])
    step = prompt(1, 9).expand(3, 1)
    with seergate.attached(model, method):
        caches = []
        for chosen in (rows, [rows[i] for i in order]):
            cache, batch = DynamicCache(), left_padded(chosen)
            model(**batch, past_key_values=cache)
            caches.append(cache)
        caches[0].reorder_cache(order)
        masks = [left_padded([rows[i] for i in order])["attention_mask"]] * 2
        # the first batch was as wide as its longest row, which the new order keeps
        for _ in range(12):
            masks = [torch.cat((mask, torch.ones(3, 1, dtype=mask.dtype)), 1) for mask in masks]
            positions = masks[0].sum(1, keepdim=True) - 1
            a, b = (
                model(input_ids=step, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
                for mask, cache in zip(masks, caches, strict=True)
            )
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
            step = a[:, -1:].argmax(-1)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("length", [1, 3 * BLOCK])
def test_short_and_whole_block_prompts(name, length):
    model = tiny_model("qwen3")
    found, _ = tokens(model, pick(model, name, BLOCK + 1), {"input_ids": prompt(length)}, new=30)
    assert found.shape == (1, 30)


@pytest.mark.parametrize("name", [*SELECTING, "dense"])
def test_drafted_tokens_are_verified_with_the_methods_own_attention(name):
    """A chunk gives what its tokens give one by one, over block borders and in ragged rows."""
    model = tiny_model("qwen3")
    batch = left_padded([prompt(40, 1), prompt(23, 2)])
    drafts = prompt(19, 3).expand(2, -1)
    with seergate.attached(model, pick(model, name, 2 * BLOCK)) as handle:
        results = []
        for sizes in ([1] * 19, [1, 5, 9, 4]):
            cache, mask, at, logits = DynamicCache(), batch["attention_mask"], 0, []
            model(**batch, past_key_values=cache)
            handle.reset_stats()
            for size in sizes:
                mask = torch.cat((mask, torch.ones(2, size, dtype=mask.dtype)), 1)
                positions = (mask.cumsum(1) - 1)[:, -size:]
                ids = drafts[:, at : at + size]
                with handle.passes.forced("decode"):
                    out = model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
                logits.append(out.logits)
                at += size
            results.append((torch.cat(logits, 1), handle.stats()["density"]))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-4)
    assert results[0][1] == pytest.approx(results[1][1])


def test_detaching_leaves_no_trace():
    model = tiny_model("gemma3_text")
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    hooks = {
        name: len(module._forward_hooks) + len(module._forward_pre_hooks) for name, module in model.named_modules()
    }
    plain = model.generate(input_ids=prompt(20), max_new_tokens=10)
    handle = seergate.attach(model, gates(model), token_budget=BLOCK)
    assert not torch.equal(model.generate(input_ids=prompt(60), max_new_tokens=10)[:, 60:], plain[:, 20:])
    handle.detach()
    handle.detach()
    assert torch.equal(model.generate(input_ids=prompt(20), max_new_tokens=10), plain)
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
        assert vars(module).get("config") is before[name].get("config")
        assert len(module._forward_hooks) + len(module._forward_pre_hooks) == hooks[name]


def test_gated_and_plain_models_live_side_by_side():
    one, two, plain = tiny_model("qwen3", seed=1), tiny_model("qwen3", seed=2), tiny_model("qwen3", seed=1)
    inputs = {"input_ids": prompt(40)}
    alone = [tokens(model, methods.Oracle(token_budget=BLOCK, block_size=BLOCK), inputs)[0] for model in (one, two)]
    expected = plain.generate(**inputs, max_new_tokens=20)[:, 40:]
    handles = [seergate.attach(model, "oracle", token_budget=BLOCK, block_size=BLOCK) for model in (one, two)]
    assert torch.equal(one.generate(**inputs, max_new_tokens=20)[:, 40:], alone[0])
    assert torch.equal(plain.generate(**inputs, max_new_tokens=20)[:, 40:], expected)
    assert torch.equal(two.generate(**inputs, max_new_tokens=20)[:, 40:], alone[1])
    for handle in handles:
        handle.detach()


def test_sliding_layers_keep_their_own_cache():
    model = tiny_model("gemma3_text")
    cache = DynamicCache(config=model.config)
    with seergate.attached(model, "dense"):
        model(input_ids=prompt(20), past_key_values=cache)
    assert [isinstance(layer, GatedLayer) for layer in cache.layers] == [False, True]


def test_statistics_count_what_was_read():
    model = tiny_model("qwen3")
    budget, length, new = 3 * BLOCK, 50, 15
    with seergate.attached(model, "oracle", token_budget=budget, block_size=BLOCK, measure_recall=True) as handle:
        model.generate(input_ids=prompt(length), max_new_tokens=new + 1)
        stats = handle.stats()
        handle.reset_stats()
        assert handle.stats()["steps"] == 0
    assert stats["steps"] == new
    ends = [length + i + 1 for i in range(new)]
    read = [2 * BLOCK + (end - 1) % BLOCK + 1 for end in ends]
    assert stats["density"] == pytest.approx(sum(read) / sum(ends))
    assert stats["blocks_per_head"] == [[3.0, 3.0]] * 2
    per_token, heads, layers = 2 * 16 * 4, 2, 2
    scored = sum(ends) * 16 * 4 * heads
    assert stats["bytes_read_per_step"] == pytest.approx(layers * (sum(read) * per_token * heads + scored) / new)
    assert all(0 < recall < 1 for recall in stats["recall_per_layer"])


def test_informed_selections_recall_more_than_random_ones():
    model = tiny_model("qwen3")
    recall = {}
    for method in (
        methods.Oracle(token_budget=2 * BLOCK, block_size=BLOCK),
        methods.Quest(token_budget=2 * BLOCK, block_size=BLOCK, dense_layers=()),
        methods.Random(token_budget=2 * BLOCK, block_size=BLOCK),
    ):
        with seergate.attached(model, method, measure_recall=True) as handle:
            model.generate(input_ids=prompt(120), max_new_tokens=10)
            recall[method.name] = sum(handle.stats()["recall_per_layer"])
    assert min(recall["oracle"], recall["quest"]) > 1.2 * recall["random"]


def test_threshold_top_p_and_dense_layers():
    model = tiny_model("qwen3")
    bank = gates(model)
    density = {}
    for name, options in {
        "strict": {"threshold": 0.9},
        "loose": {"threshold": 1e-6},
        "nucleus": {"top_p": 0.5},
        "wide nucleus": {"top_p": 0.999},
        "first layer dense": {"threshold": 0.9, "dense_layers": (0,)},
    }.items():
        with seergate.attached(model, bank, DecodeConfig(**options)) as handle:
            model.generate(input_ids=prompt(100), max_new_tokens=10)
            density[name] = handle.stats()["density_per_layer"]
    assert sum(density["strict"]) < sum(density["loose"])
    assert sum(density["nucleus"]) < sum(density["wide nucleus"])
    assert density["first layer dense"][0] == 1 and density["first layer dense"][1] == pytest.approx(
        density["strict"][1], rel=0.5
    )


def test_evicting_methods_hold_little():
    model = tiny_model("qwen3")
    with seergate.attached(model, "streaming_llm", token_budget=20, interval=8) as handle:
        cache = DynamicCache()
        model.generate(input_ids=prompt(300), max_new_tokens=200, past_key_values=cache)
        assert max(cache.layers[0].rows.held) <= 28
        assert cache.layers[0].keys.shape[2] == 28, "the prompt's room is given back"
        assert handle.stats()["density"] < 0.08
        with pytest.raises(SeergateError, match="takes a prompt in one piece"):
            model(input_ids=prompt(5), past_key_values=cache)
        with pytest.raises(SeergateError, match="cannot be cropped"):
            cache.crop(-1)


@pytest.mark.parametrize("evil", ["plain first", "plain between", "other method", "other batch"])
def test_a_cache_that_the_method_has_not_seen_is_refused(evil):
    model = tiny_model("qwen3")
    cache = DynamicCache()
    if evil == "plain first":
        model(input_ids=prompt(9), past_key_values=cache)
    with seergate.attached(model, "quest", token_budget=BLOCK, block_size=BLOCK, dense_layers=()):
        if evil != "plain first":
            model(input_ids=prompt(9), past_key_values=cache)
    if evil == "plain between":
        model(input_ids=prompt(1), past_key_values=cache)
    name = "oracle" if evil == "other method" else "quest"
    method = methods.make_method(name, token_budget=BLOCK, block_size=BLOCK)
    if evil == "other batch":
        method = methods.Dense()
        cache = DynamicCache()
    with seergate.attached(model, method), pytest.raises(SeergateError, match="new one|new cache"):
        if evil == "other batch":
            model(input_ids=prompt(9), past_key_values=cache)
            model(input_ids=prompt(1).expand(2, 1), past_key_values=cache)
        else:
            model(input_ids=prompt(1), past_key_values=cache)


def test_bad_requests():
    model, other = tiny_model("qwen3"), tiny_model("llama")
    bank = gates(model)
    cases = [
        (lambda: seergate.attach(other, bank), "model_type is 'llama' in the model and 'qwen3' in the gates"),
        (lambda: seergate.attach(model, "qest"), "did you mean 'quest'"),
        (lambda: seergate.attach(model, "gate", token_budget=64), "needs gates"),
        (lambda: seergate.attach(model, "quest", budget=64), "no option 'budget'"),
        (lambda: seergate.attach(model, bank, budget=64), "no decode option 'budget'"),
        (lambda: seergate.attach(model, bank, token_budget=BLOCK - 1), "token_budget is 7.*at least 8"),
        (lambda: seergate.attach(model, bank, threshold=1.0), "threshold is 1.0.*between 0 and 1"),
        (lambda: seergate.attach(model, bank, token_budget=64, top_p=0.9), "token_budget and top_p are both given"),
        (lambda: seergate.attach(model, 3), "the method is a int"),
        (lambda: seergate.attach(model, bank, {"token_budget": 64}), "config is a dict; it must be a DecodeConfig"),
    ]
    for attempt, message in cases:
        with pytest.raises(ValueError, match=message):
            attempt()
    assert model.generate(input_ids=prompt(4), max_new_tokens=2).shape == (1, 6), (
        "a refusal leaves the model as it was"
    )
    handle = seergate.attach(model, bank)
    with pytest.raises(SeergateError, match=r"seergate\.handle_of\(model\)\.detach\(\)"):
        seergate.attach(model, bank)
    handle.detach()
