"""Decoding inside stock `generate`: equal to the plain model where it must be, and to itself in any batch."""

import itertools

import pytest
import torch
from transformers import DynamicCache

import seergate
from seergate import SeergateError, methods
from seergate.cache.layer import GatedLayer
from seergate.models import families
from tests.methods.test_evicting import EACH
from tests.support.decoding import Decoding
from tests.support.evictors import EVICTORS, GROUPS, model_of
from tests.support.models import FAMILIES, gates, left_padded, prompt, tiny_model
from tests.support.reasoning import Words
from tests.support.running import invalid, refused

BLOCK = 8


def selector(model, name, budget=2 * BLOCK, block_size=BLOCK, **options):
    """A method that selects, in all layers; each call draws other gates."""
    if name == "gate":
        bank = gates(model, block_size, gate_dim=model.get_decoder().layers[-1].self_attn.head_dim)
        return methods.Gate(bank=bank, token_budget=budget, **options)
    return methods.make_method(name, token_budget=budget, **{"block_size": block_size, "dense_layers": (), **options})


def all_methods(model, budget):
    return [
        *(selector(model, name, budget) for name in ("gate", "oracle", "quest")),
        selector(model, "resa", budget, rectify_every=None),
        selector(model, "random", budget),
        methods.StreamingLLM(token_budget=budget),
        methods.Dense(),
        # on pages, its steps compared, and nothing near enough to be shared
        methods.ReasonCache(reads=selector(model, "quest", budget), tokenizer=Words(), percentile=0, warm_up=0),
    ]


METHODS = ("gate", "oracle", "quest", "resa", "random", "streaming_llm", "dense", "reason_cache")
SELECTING = ("gate", "oracle", "quest", "resa", "random")


def tokens(model, method, inputs, new=20, **options):
    with seergate.attached(model, method):
        out = model.generate(**inputs, max_new_tokens=new, return_dict_in_generate=True, output_logits=True, **options)
    return out.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(out.logits, 1)


def test_every_method_is_in_the_table():
    """Evicting methods have a table of their own; a control that shares at random has its method's row."""
    evicting = {name for name, kind in methods.METHODS.items() if issubclass(kind, methods.CompressingMethod)}
    assert set(METHODS) - {"streaming_llm"} == set(methods.METHODS) - evicting - {"random_sharing"}
    assert evicting == {name.split(" ")[0] for name in EVICTORS}


def pick(model, name, budget):
    return next(method for method in all_methods(model, budget) if method.name == name)


UNLIKE = ["qwen3", "gemma3_text", "gpt_oss"]


def pairs(others, least):
    """Every method with one of ``others`` in turn, the methods in ``least`` with all of them."""
    method_pairs = list(zip(METHODS, itertools.cycle(others), strict=False))
    return list(dict.fromkeys(method_pairs + [(name, other) for name in least for other in others]))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_budget_for_everything_is_the_plain_model(family):
    """In a left-padded batch, in layers too that do not rotate, or normalise after rotating. Invariants 1, 2 and 6."""
    model = tiny_model(family)
    batch = left_padded([prompt(19, 1), prompt(11, 2)])
    plain = model.generate(**batch, max_new_tokens=10, return_dict_in_generate=True, output_logits=True)
    kind = families.rope_kind(model.config.get_text_config(), families.full_attention_modules(model)[0][1])
    for method in all_methods(model, 4096):
        if method.name == "streaming_llm" and kind == "other":
            refused("re-positions keys", seergate.attach, model, method)
            continue
        with seergate.attached(model, method):
            output = model.generate(**batch, max_new_tokens=10, return_dict_in_generate=True, output_logits=True)
        torch.testing.assert_close(torch.stack(output.logits), torch.stack(plain.logits), rtol=2e-4, atol=2e-4)


def test_queries_that_are_scaled_by_their_position():
    """Ministral 3 multiplies queries beyond a length, in the cache's positions too."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.5}
    model = tiny_model("ministral3", rope_parameters={**rope, "original_max_position_embeddings": 8})
    batch = left_padded([prompt(19, 1), prompt(11, 2)])
    plain = model.generate(**batch, max_new_tokens=10, return_dict_in_generate=True, output_logits=True)
    for name in ("streaming_llm", "gate"):
        _, logits = tokens(model, pick(model, name, 4096), batch, new=10)
        torch.testing.assert_close(logits, torch.stack(plain.logits, 1), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "kind"), pairs(UNLIKE, ["gate", "quest", "streaming_llm"]) + pairs(list(GROUPS), ["gate", "quest"])
)
def test_a_row_is_the_same_alone_and_in_any_batch(kind, name):
    """Of families, and with 1, 4 and 5 query heads per KV head: there with a budget for everything the plain model."""
    model = tiny_model(kind) if kind in UNLIKE else model_of(kind, num_hidden_layers=1)
    rows = [prompt(length, seed) for seed, length in enumerate((5, 40, 16, 33))]
    batch, method = left_padded(rows), pick(model, name, 2 * BLOCK)
    together, logits = tokens(model, method, batch, new=24)
    for i, row in enumerate(rows):
        alone, alone_logits = tokens(model, method, {"input_ids": row}, new=24)
        assert torch.equal(alone[0], together[i])
        torch.testing.assert_close(alone_logits[0], logits[i], rtol=2e-4, atol=2e-4)
    if kind in GROUPS:
        out = model.generate(**batch, max_new_tokens=24, return_dict_in_generate=True, output_logits=True)
        plain, (_, covered) = torch.stack(out.logits, 1), tokens(model, pick(model, name, 4096), batch, new=24)
        torch.testing.assert_close(covered, plain, rtol=2e-4, atol=2e-4)
        assert name == "dense" or (logits - plain).abs().max() > 1e-2, "it must be sparse"


@pytest.mark.parametrize("name", list(dict.fromkeys([*METHODS, *EACH])))
def test_reordering_and_selecting_rows(model, name):
    """After a prompt, and after 15 steps, in which evictors evict."""
    rows, order = [prompt(length, seed) for seed, length in enumerate((40, 9, 23))], [2, 0, 2]
    method = EVICTORS[name].method(model) if name in EVICTORS else pick(model, name, 2 * BLOCK)
    texts = torch.cat([prompt(40, seed) for seed in range(3)])
    for steps in (0, 15):
        with seergate.attached(model, method), torch.inference_mode():
            # the first batch is as wide as its longest row, which the new order keeps
            one, other = (Decoding(model, **left_padded([rows[i] for i in chosen])) for chosen in (range(3), order))
            for at in range(40):
                if at == steps:
                    one.take(order)
                other.read(texts[order, at, None])
                one.read(texts[:, at, None] if at < steps else texts[order, at, None])
                got = one.logits if at >= steps else one.logits[order]
                torch.testing.assert_close(got, other.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gate", "quest", "streaming_llm"])
def test_autocast(name):
    model = tiny_model("llama")
    with seergate.attached(model, pick(model, name, 16)), torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.generate(input_ids=prompt(40), max_new_tokens=12).shape == (1, 52)


@pytest.mark.parametrize("name", ["gate", "quest", "oracle", "random", "dense"])
def test_padding_that_arrives_token_by_token(model, name):
    """The first slots of a left-padded batch as a prompt, the rest one by one: a row may have no real token yet."""
    batch = left_padded([prompt(40, 1), prompt(9, 2)])
    ids, mask = batch["input_ids"], batch["attention_mask"]
    method, positions = pick(model, name, 4096), (mask.cumsum(1) - 1).clamp(min=0)
    with seergate.attached(model, method):
        rows = Decoding(model, ids[:, :20], mask[:, :20])
        for i in range(20, 40):
            out = rows.read(ids[:, i, None], mask[:, i, None])[:, -1]
        cache = rows.cache
    whole = model(**batch, position_ids=positions).logits[:, -1]
    torch.testing.assert_close(out, whole, rtol=2e-4, atol=2e-4)
    if name == "gate":
        with seergate.attached(model, method):
            straight = DynamicCache()
            model(**batch, position_ids=positions, past_key_values=straight)
        for row, blocks in ((0, 5), (1, 1)):
            one, other = ([x.state.rows["kg"][row, :, :blocks] for x in c.layers] for c in (cache, straight))
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_masked_token_in_the_middle_of_decoding_is_not_stored(model):
    ids, paused = prompt(20, 1).expand(2, -1), torch.tensor([[1], [0]])

    def step_logits():
        rows = Decoding(model, ids[:, :18])
        rows.read(ids[:, 18:19], paused)
        return rows.read(ids[:, 19:])

    plain = step_logits()
    with seergate.attached(model, "dense"):
        torch.testing.assert_close(step_logits(), plain, rtol=1e-4, atol=1e-4)


def test_detaching_leaves_no_trace():
    """Layers with a window keep their own cache while a method is attached."""
    model = tiny_model("gemma3_text")

    def hooks():
        return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]

    before, hooked = {name: dict(vars(module)) for name, module in model.named_modules()}, hooks()
    with seergate.attached(model, "dense"):
        model(input_ids=prompt(20), past_key_values=(cache := DynamicCache(config=model.config)))
    assert [isinstance(layer, GatedLayer) for layer in cache.layers] == [False, True]
    plain = model.generate(input_ids=prompt(20), max_new_tokens=10)
    handle = seergate.attach(model, gates(model), token_budget=2 * BLOCK)
    assert not torch.equal(model.generate(input_ids=prompt(60), max_new_tokens=10)[:, 60:], plain[:, 20:])
    handle.detach()
    handle.detach()
    assert torch.equal(model.generate(input_ids=prompt(20), max_new_tokens=10), plain)
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
        assert vars(module).get("config") is before[name].get("config")
    assert hooks() == hooked


def test_gated_and_plain_models_live_side_by_side():
    one, two, plain = tiny_model("qwen3", seed=1), tiny_model("qwen3", seed=2), tiny_model("qwen3", seed=1)
    inputs, oracle = {"input_ids": prompt(40)}, {"token_budget": 2 * BLOCK, "block_size": BLOCK}
    alone = [tokens(model, methods.Oracle(**oracle), inputs)[0] for model in (one, two)]
    expected = plain.generate(**inputs, max_new_tokens=20)[:, 40:]
    handles = [seergate.attach(model, "oracle", **oracle) for model in (one, two)]
    assert torch.equal(one.generate(**inputs, max_new_tokens=20)[:, 40:], alone[0])
    assert torch.equal(plain.generate(**inputs, max_new_tokens=20)[:, 40:], expected)
    assert torch.equal(two.generate(**inputs, max_new_tokens=20)[:, 40:], alone[1])
    for handle in handles:
        handle.detach()


def test_statistics_count_what_was_read(model):
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


def test_streaming_llm_reports_what_it_attends_and_the_prompt_it_held(model):
    with seergate.attached(model, "streaming_llm", token_budget=20, interval=16) as handle:
        model.generate(input_ids=prompt(2000), max_new_tokens=40)
        stats = handle.stats()
    seen = [2000 + i for i in range(1, 40)]
    assert stats["density"] == pytest.approx(20 * 39 / sum(seen))
    per_token = 2 * 16 * 4 * 2 * 2  # key and value, width, bytes, heads, layers
    assert stats["bytes_read_per_step"] == pytest.approx(20 * per_token)
    assert stats["resident_bytes_peak"] >= 2000 * per_token
    assert stats["resident_bytes_mean"] < 1000 * per_token


def test_evicting_methods_take_no_further_prompt_and_no_crop(model):
    with seergate.attached(model, "streaming_llm", token_budget=20, interval=8):
        cache = DynamicCache()
        model.generate(input_ids=prompt(300), max_new_tokens=20, past_key_values=cache)
        assert cache.layers[0].keys.shape[2] == 28, "the prompt's room is given back"
        refused("takes one prompt", model, input_ids=prompt(5), past_key_values=cache)
        assert len({layer.rows.slots for layer in cache.layers}) == 1, "refused before a layer has stored"
        refused("cannot be cropped", cache.crop, -1)


@pytest.mark.parametrize("evil", ["plain first", "plain between", "other method", "other batch"])
def test_a_cache_that_the_method_has_not_seen_is_refused(model, evil):
    cache, rows = DynamicCache(), 2 if evil == "other batch" else 1
    options = {"token_budget": 2 * BLOCK, "block_size": BLOCK, "dense_layers": ()}
    if evil == "plain first":
        model(input_ids=prompt(9), past_key_values=cache)
    else:
        with seergate.attached(model, "quest", **options):
            model(input_ids=prompt(9), past_key_values=cache)
    if evil == "plain between":
        model(input_ids=prompt(1), past_key_values=cache)
    method = methods.make_method("oracle" if evil == "other method" else "quest", **options)
    with seergate.attached(model, method), pytest.raises(SeergateError, match="new one|new cache"):
        model(input_ids=prompt(1).expand(rows, 1), past_key_values=cache)


def test_bad_requests():
    """A refusal leaves the model as it was."""
    model = tiny_model("qwen3")
    bank = gates(model)
    refused("needs gates: pass .* instead of the name", seergate.attach, model, "gate", token_budget=64)
    invalid("threshold is 1.0.*between 0 and 1", seergate.attach, model, bank, threshold=1.0)
    invalid("the method is 3;", seergate.attach, model, 3)
    invalid("config is a dict; it must be a DecodeConfig", seergate.attach, model, bank, {"token_budget": 64})
    assert model.generate(input_ids=prompt(4), max_new_tokens=2).shape == (1, 6)
    handle = seergate.attach(model, bank)
    refused(r"seergate\.handle_of\(model\)\.detach\(\)", seergate.attach, model, bank)
    handle.detach()
    seergate.attach(model.to(torch.bfloat16), bank).detach()  # gates accept a model that was converted
