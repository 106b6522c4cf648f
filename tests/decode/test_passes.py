"""What a pass is, which thread may run one, and what goes together: what `attach` accepts, and what it refuses."""

import copy
import threading
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, StaticCache

import seergate
from seergate import Offload, Paging, Rectify, SeergateError, methods
from seergate.decode.compatibility import REFUSED, refuse
from seergate.models import families
from seergate.models.hooks import ATTENTION_NAME, QKHook
from seergate.models.rope import Rotary
from tests.decode.test_decode import BLOCK, gates
from tests.support.models import left_padded, prompt, tiny_model
from tests.support.running import ended_by, invalid, refused


def after_decoding(model, read):
    """Logits of a chunk that ``read`` reads on a cache that has decoded already."""
    ids, cache = prompt(70), DynamicCache()
    model(input_ids=ids[:, :40], past_key_values=cache)
    for i in range(40, 50):
        model(input_ids=ids[:, i : i + 1], past_key_values=cache)
    return read(cache, ids[:, 50:56])


@torch.no_grad()
@pytest.mark.parametrize("name", ["quest", "oracle"])
def test_a_chunk_outside_of_generate_is_a_prompt(model, name):
    """However short, and after a crop too; unless its tokens are declared as drafted."""
    options = {"token_budget": 2 * BLOCK, "block_size": BLOCK, "dense_layers": ()}
    with seergate.attached(model, name, **options) as handle:
        passes = handle.passes

        def chunk(cache, ids):
            return model(input_ids=ids, past_key_values=cache).logits

        def cropped(cache, ids):
            chunk(cache, ids[:, :3])
            cache.crop(-3)
            return chunk(cache, ids)

        def forced(mode):
            def read(cache, ids):
                with passes.forced(mode):
                    return chunk(cache, ids)

            return read

        def one_by_one(cache, ids):
            return torch.cat([chunk(cache, ids[:, i : i + 1]) for i in range(ids.shape[1])], 1)

        dense, sparse = after_decoding(model, forced("dense")), after_decoding(model, one_by_one)
        for read, want in ((chunk, dense), (cropped, dense), (forced("decode"), sparse)):
            torch.testing.assert_close(after_decoding(model, read), want, rtol=1e-4, atol=1e-5)
        assert (dense - sparse).abs().max() > 1e-2
        mask, hides = torch.ones(1, 56), "attention_mask hides tokens that are to be decoded"
        mask[0, 53] = 0
        with pytest.raises(SeergateError, match=hides), passes.forced("decode"):
            after_decoding(model, lambda cache, ids: model(ids, attention_mask=mask, past_key_values=cache))


def test_a_chat_attaches_an_equal_method_for_each_turn(model):
    """A cache goes on under any method that is equal to its own, and under no other."""
    options = {"token_budget": 32, "block_size": BLOCK}
    texts = []
    for turns in (1, 2):
        cache, ids = DynamicCache(), prompt(40)
        for turn in range(2):
            if turn == 0 or turns == 2:
                handle = seergate.attach(model, "quest", **options)
            ids = model.generate(ids, past_key_values=cache, max_new_tokens=5)
            if turn or turns == 2:
                handle.detach()
        texts.append(ids)
    assert torch.equal(*texts)
    message = "filled under Quest.*token_budget=32.*a new one for .*token_budget=16"
    with seergate.attached(model, "quest", **{**options, "token_budget": 16}):
        refused(message, model.generate, ids, past_key_values=cache, max_new_tokens=5)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_model_and_its_peft_wrapper_are_one(model):
    peft = pytest.importorskip("peft")
    base = tiny_model("qwen3")
    wrapped = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"])).eval()
    for one, other in ((wrapped, base), (base, wrapped)):
        with seergate.attached(one, "quest") as handle:
            assert seergate.handle_of(other) is handle
            wrapped.generate(input_ids=prompt(60), max_new_tokens=6, prefill_chunk_size=1)
            assert handle.stats()["steps"] == 5, "prompts are known as prompts"
            refused("has a method attached already", seergate.attach, other, "quest")
        refused("no method is attached", seergate.handle_of, one)
    assert "_prefill" not in vars(base)
    prompts = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    refused("prompt tuning", seergate.attach, peft.get_peft_model(tiny_model("qwen3"), prompts), "quest")
    prefix = peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    with seergate.attached(peft.get_peft_model(tiny_model("qwen3"), prefix), "quest"):
        pass
    base.config.name_or_path = "org/base"
    assert gates(wrapped).geometry.base_model is None, "the base alone is not what these gates are for"


def test_a_hook_that_changes_keys_may_be_added_after_the_method():
    """As one of activation steering: the method sees the changed keys before RoPE, as attention does."""
    model = tiny_model("llama")
    bank, texts = gates(model), list[torch.Tensor]()
    with seergate.attached(model, bank, token_budget=2 * BLOCK):
        for layer in model.model.layers:
            layer.self_attn.k_proj.register_forward_hook(lambda module, args, keys: keys + torch.arange(32) / 8 - 2)
        texts.append(model.generate(prompt(60), max_new_tokens=12))
    with seergate.attached(model, bank, token_budget=2 * BLOCK):
        texts.append(model.generate(prompt(60), max_new_tokens=12))
    assert torch.equal(*texts)


SHARED = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "num_hidden_layers": 4} | {
    **{"layer_types": ["sliding_attention", "full_attention"] * 2, "attention_k_eq_v": False}
}
"""A Gemma 4 whose last layers read the keys of earlier ones, with as many KV heads in all layers."""


def attempts():
    """Tags -> what is attached, to what, and the cache that is used."""
    small, rectified = {"block_size": BLOCK, "token_budget": 2 * BLOCK}, {"correction": Rectify(4)}
    paged, offloaded = {"storage": Paging()}, {"storage": Offload(1 << 20)}
    return {
        ("paged", "static"): ("qwen3", "quest", {**small, **paged}),
        ("offloaded", "static"): ("qwen3", "quest", {**small, **offloaded}),
        ("paged", "evicting"): ("qwen3", "h2o", paged),
        ("offloaded", "evicting"): ("qwen3", "h2o", offloaded),
        ("offloaded", "dense"): ("qwen3", "dense", offloaded),
        ("offloaded", "query heads apart"): ("qwen3", "quest", {**small, **offloaded, "group_reduction": "separate"}),
        ("offloaded", "rectified"): ("qwen3", "oracle", {**small, **offloaded, **rectified}),
        ("paged", "rectified"): ("qwen3", "oracle", {**small, **paged, **rectified}),
        ("evicting", "rectified"): ("qwen3", "snapkv", rectified),
        ("evicting", "shared keys"): ("gemma4_text", "kv4bit", {}),
        ("dense", "rectified"): ("qwen3", "dense", rectified),
        ("rectified", "one-way layers"): ("qwen3_5_text", "oracle", {**small, **rectified}),
        ("rectified", "one-way cache"): ("gemma3_text", "oracle", {**small, **rectified}),
        ("moves keys", "own rope"): ("hunyuan_v1_dense", "streaming_llm", {}),
        ("rectified past a block", "own rope"): ("hunyuan_v1_dense", "gate", {"correction": Rectify(BLOCK + 1)}),
    }


def test_every_row_of_the_table_is_reached():
    """What is in no row goes together."""
    assert attempts().keys() == REFUSED.keys()
    refuse({"selecting": "quest", "static": "a static", "rectified": "rectification"})


@pytest.mark.parametrize("pair", REFUSED, ids=" and ".join)
def test_what_does_not_go_together(pair):
    """Refused for the reason that the table gives, and the model is left as it was."""
    family, method, options = attempts()[pair]
    model = tiny_model(family, **SHARED if pair[1] == "shared keys" else {})
    if method == "gate":
        method, options = gates(model), {**options, "token_budget": 2 * BLOCK}
    start = REFUSED[pair].split("{")[0] or REFUSED[pair].split("}")[1].split("{")[0]
    with pytest.raises(SeergateError) as caught, seergate.attached(model, method, **options):
        assert pair[1] in ("static", "one-way cache"), "what is known of the model is refused by attach"
        if pair[1] == "static":
            model(input_ids=prompt(20), past_key_values=StaticCache(model.config, max_cache_len=32))
        model.generate(prompt(45), max_new_tokens=8, cache_implementation="static")
    assert start in str(caught.value)
    assert "_prefill" not in vars(model)
    seergate.attach(model, "dense").detach()


def test_rectification_of_windows_needs_a_newer_transformers(monkeypatch):
    monkeypatch.setattr("seergate.models.attach.transformers.__version__", "5.17.0")
    with pytest.raises(SeergateError, match=r"layers of kind sliding_attention \(transformers 5.17.0\)"):
        seergate.attach(tiny_model("gemma3_text"), "oracle", token_budget=256, correction=Rectify(4))


def test_rectification_within_a_block_needs_no_keys_before_rope():
    """Of the models whose RoPE has a form of its own: as often as this, what gates remember is enough."""
    model = tiny_model("hunyuan_v1_dense")
    with seergate.attached(model, gates(model), token_budget=2 * BLOCK, correction=Rectify(BLOCK)) as handle:
        model.generate(**left_padded([prompt(40, 1), prompt(29, 2)]), max_new_tokens=50)
        assert handle.stats()["rectification"]["passes"] >= 5


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "phi3", "ernie4_5", "glm4", "gemma3_text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unrotating_has_no_bias(family, dtype):
    """Cosines and sines of bfloat16 stretch each pair by another factor."""
    model = tiny_model(family)
    config, (layer, attention) = families.text_config(model), families.full_attention_modules(model)[0]
    kind = families.rope_kind(config, attention)
    rotary = Rotary(families.decoder_of(model), attention, families.layer_type(config, layer), kind)
    x, positions = torch.randn(1, 1, 4000, attention.head_dim).to(dtype), torch.arange(4000)[None]
    back = rotary.unrotate(rotary.rotate(x, positions), positions).double()
    ratio = (back * x.double()).sum(2) / x.double().square().sum(2)
    assert (ratio - 1).abs().max() < 1e-3
    torch.testing.assert_close(back, x.double(), rtol=0, atol=3e-2 if dtype == torch.bfloat16 else 1e-5)


def test_methods_with_a_correction_of_their_own(model):
    """ReSA brings its dense passes; what is given to `attach` takes their place."""
    options = {"token_budget": 32, "block_size": BLOCK}
    for method, given, every in (
        (methods.ReSA(**options), None, 32),
        (methods.ReSA(**options, rectify_every=6), None, 6),
        (methods.ReSA(**options), Rectify(7), 7),
    ):
        with seergate.attached(model, method, correction=given) as handle:
            assert handle.stats()["rectification"]["every"] == every
    with seergate.attached(model, methods.ReSA(**options, rectify_every=None)) as handle:
        assert "rectification" not in handle.stats()
    invalid("every is 0", methods.ReSA, **options, rectify_every=0)


def test_the_dense_implementation_sees_its_own_name(model):
    """transformers' FlashAttention wrapper looks up which version to run in the module's configuration."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    seen = []

    def spy(module, *args, **kwargs):
        seen.append(module.config._attn_implementation)
        return sdpa_attention_forward(module, *args, **kwargs)

    AttentionInterface.register("spy", spy)
    model.config._attn_implementation_internal = "spy"
    with seergate.attached(model, gates(model), token_budget=16):
        model.generate(input_ids=prompt(20), max_new_tokens=2)
        assert families.full_attention_modules(model)[0][1].config._attn_implementation == ATTENTION_NAME
    assert set(seen) == {"spy"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside torch
def test_flex_attention_is_refused_before_and_after_a_method_is_attached():
    model = tiny_model("qwen3")
    with seergate.attached(model, "quest", token_budget=32, block_size=8), torch.no_grad():
        model.set_attn_implementation("flex_attention")
        refused("masks do not tell padding", model, prompt(20), past_key_values=DynamicCache())
    refused("masks do not tell padding", seergate.attach, model, "quest")


@pytest.mark.parametrize("place", ["self_attn.q_proj", "mlp", "between chunks"])
def test_a_second_thread_is_refused_and_the_first_goes_on(model, place):
    """What a module catches on the way would be mixed up. A thread that comes later, or after an error, is welcome."""
    own, arrived, go, results, seen = copy.deepcopy(model), threading.Event(), threading.Event(), {}, []
    options = {"prefill_chunk_size": 20} if place == "between chunks" else {}

    def wait(*_):
        if threading.current_thread() is threading.main_thread():
            return
        seen.append(place)
        if len(seen) == (2 if place == "between chunks" else 1):
            arrived.set()
            go.wait(60)

    def run(number, **given):
        try:
            results[number] = own.generate(prompt(50, number), max_new_tokens=4, **given)
        except SeergateError as error:
            results[number] = error

    with seergate.attached(own, gates(model), token_budget=32) as handle:
        want = own.generate(prompt(50, 1), max_new_tokens=4, **options)
        hooked = own if place == "between chunks" else own.model.layers[0].get_submodule(place)
        hook = hooked.register_forward_pre_hook(wait)
        first = threading.Thread(target=run, args=(1,), kwargs=options)
        first.start()
        assert arrived.wait(60)
        run(2)
        hook.remove()
        go.set()
        first.join()
        assert "two threads run this model at once" in str(results[2])
        assert torch.equal(results[1], want)
        assert (handle.passes.phase, handle.passes.in_chunks, handle.passes.thread) == (None, False, None)
        later = threading.Thread(target=run, args=(1,), kwargs=options)
        later.start()
        later.join()
        assert torch.equal(results[1], want)


@pytest.mark.parametrize("where", ["before", "inside"])
def test_a_pass_that_failed_or_was_nested_refuses_no_later_thread(model, where):
    """An error may come from another hook of the decoder or from within it; rectification nests passes."""
    own, results = copy.deepcopy(model), {}

    def run():
        results["later"] = own.generate(prompt(50), max_new_tokens=12)

    with seergate.attached(own, gates(model), token_budget=32, correction=Rectify(4)) as handle:
        want = own.generate(prompt(50), max_new_tokens=12)
        assert handle.stats()["rectification"]["passes"] > 0
        with ended_by(ArithmeticError, own.model if where == "before" else own.model.layers[1], before=True):
            own.generate(prompt(50), max_new_tokens=12)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert torch.equal(results["later"], want)


def test_a_cache_that_is_no_list_of_layers_is_said_to_be_dense(model):
    """What transformers' continuous batching passes to the layers in the place of a cache."""
    pages = SimpleNamespace(
        get_query_offset=lambda layer_idx: 0,
        get_mask_sizes=lambda query_length, layer_idx: (query_length, 0),
        update=lambda keys, values, *args, **kwargs: (keys, values),
    )
    with seergate.attached(model, gates(model), token_budget=32) as handle, pytest.warns(match="own paged cache"):
        model(prompt(60), position_ids=torch.arange(60)[None], use_cache=False, cache=pages)
    assert handle.stats()["steps"] == 0


@pytest.mark.soak
def test_pages_of_transformers_are_said_to_be_dense(model):
    with seergate.attached(model, gates(model), token_budget=32), pytest.warns(match="own paged cache"):
        model.generate(prompt(60), max_new_tokens=4, cache_implementation="paged", eos_token_id=-1)


def test_layers_that_read_the_keys_of_a_gated_layer(model):
    """Gemma 4: the last layers have no keys of their own; one row is padded."""
    shared = tiny_model("gemma4_text", **SHARED)
    batch = left_padded([prompt(40), prompt(33, 1)])
    want = shared.generate(**batch, max_new_tokens=6)
    with seergate.attached(shared, "quest", token_budget=4096, block_size=4) as handle:
        assert torch.equal(shared.generate(**batch, max_new_tokens=6), want)
        assert handle.stats()["layers"] == [1]
    with seergate.attached(shared, "quest", token_budget=16, block_size=4, dense_layers=()) as handle:
        shared.generate(**batch, max_new_tokens=6)
        assert handle.stats()["density"] < 0.6
    alone = tiny_model("gemma4_text")  # no layer reads what its last full layer offers, so tokens may be evicted
    want = alone.generate(**batch, max_new_tokens=6)
    with seergate.attached(alone, "h2o"):
        assert torch.equal(alone.generate(**batch, max_new_tokens=6), want)


def test_what_a_failed_pass_leaves_is_released_by_the_next_and_not_copied(model):
    with seergate.attached(model, "quest", token_budget=32, block_size=8) as handle, torch.no_grad():
        with ended_by(MemoryError, model.model.layers[1].self_attn.v_proj):
            model(prompt(40), past_key_values=DynamicCache())
        (copied,) = (each for each in seergate.handle_of(copy.deepcopy(model)).bindings if each.layer == 1)
        assert handle.bindings[1].arriving is not None and copied.arriving is None
        model(prompt(8))
        assert handle.bindings[1].arriving is None and not handle.bindings[1].qk_hook._caught


def test_attention_that_calls_no_attention_function_is_refused(model, monkeypatch):
    """As of a patched forward; the module has no cache, so every step would see its own token only."""

    def patched(hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        return attention.o_proj(attention.q_proj(hidden_states)), None

    attention = model.model.layers[1].self_attn
    monkeypatch.setattr(attention, "forward", patched)
    with seergate.attached(model, "quest", token_budget=32, block_size=8):
        refused("Qwen3Attention of layer 1 is not transformers' own", model.generate, prompt(40), max_new_tokens=2)


def test_a_class_of_attention_that_was_replaced_is_refused(model, monkeypatch):
    """As by unsloth, whose layers are called without transformers' cache, so that every step would be dense."""
    monkeypatch.setattr(type(model.model.layers[0].self_attn), "forward", lambda *args, **kwargs: None)
    refused("the code of Qwen3Attention is not transformers' own", seergate.attach, model, "quest")
    monkeypatch.undo()
    attention = copy.deepcopy(model).model.layers[0].self_attn
    attention.__class__ = type("Own", (type(attention),), {"forward": lambda *args, **kwargs: None})
    QKHook(model, attention).remove()  # a subclass is checked as it runs


def test_apple_gpus_are_refused(model, monkeypatch):
    monkeypatch.setattr(type(model), "device", torch.device("mps"))
    refused("Apple GPUs .* are not supported", seergate.attach, model, "quest")


def test_replicas_of_data_parallel_are_refused(model):
    """They share the hooks; each runs in a thread of its own."""
    with seergate.attached(model, "quest", token_budget=32, block_size=8):
        replica = copy.copy(model.model)
        refused("use one process per GPU", replica, prompt(8))
        model(prompt(8))


@pytest.mark.parametrize("before", [0, 40])
def test_a_cache_in_which_a_pass_ended_between_layers_is_refused_until_it_is_cropped(model, before):
    """Retried, the first layer would have the tokens twice."""
    ids = prompt(41)
    with seergate.attached(model, "quest", token_budget=4096, block_size=8), torch.no_grad():
        cache = DynamicCache()
        if before:
            model(ids[:, :before], past_key_values=cache)
        with ended_by(KeyboardInterrupt, model.model.layers[0].mlp):
            model(ids[:, before:], past_key_values=cache)
        with pytest.raises(SeergateError, match=f"layer 1 of this cache holds {before} tokens and others 41: a pass"):
            model(ids[:, before:], past_key_values=cache)
        if before:
            cache.crop(before)
            again = model(ids[:, before:], past_key_values=cache).logits[:, -1]
            torch.testing.assert_close(again, model(ids).logits[:, -1], rtol=2e-4, atol=2e-4)


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    ("where", "held"), [(0, "layer 0 of this cache holds 41"), (1, "layer 2 of this cache holds 40")]
)
def test_a_pass_that_ended_before_or_after_all_gated_layers(static, where, held):
    """Layers with sliding windows have a token more or less than the only gated layer, which is between them."""
    kinds, ids = ["sliding_attention", "full_attention", "sliding_attention"], prompt(41)
    model = tiny_model("gemma3_text", num_hidden_layers=3, layer_types=kinds)
    with seergate.attached(model, "quest", token_budget=4096, block_size=8):
        cache = StaticCache(model.config, max_cache_len=64) if static else DynamicCache(config=model.config)
        model(ids[:, :40], past_key_values=cache)
        with ended_by(KeyboardInterrupt, model.model.layers[where].mlp):
            model(ids[:, 40:], past_key_values=cache)
        refused(f"{held} tokens and others 4[01]: .*; start a new one", model, ids[:, 40:], past_key_values=cache)


@pytest.mark.parametrize("where", ["model", "configuration"])
def test_a_model_of_which_the_last_layers_were_taken(where, monkeypatch):
    """Its caches have those layers still, without a token."""
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    model, ids = tiny_model("gemma3_text", num_hidden_layers=3, layer_types=kinds), prompt(40)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    if where == "model":
        monkeypatch.setattr(model.model, "layers", model.model.layers[:1])
    else:
        model.config.num_hidden_layers = 1
    want = model.generate(ids, past_key_values=caches[0], max_new_tokens=4)
    with seergate.attached(model, "quest", token_budget=4096, block_size=8, dense_layers=()):
        assert torch.equal(model.generate(ids, past_key_values=caches[1], max_new_tokens=4), want)


@pytest.mark.slow
def test_layers_that_are_compiled_and_layers_that_are_not_share_a_pass():
    """Beyond the compiler's limit of recompilations, the other layers run uncompiled; the first one knows no slots."""
    layers = torch._dynamo.config.recompile_limit + 2
    model = tiny_model("qwen3", num_hidden_layers=layers, layer_types=["full_attention"] * layers)
    ids, options = prompt(40), {"max_new_tokens": 6, "cache_implementation": "static"}
    with seergate.attached(model, "quest", token_budget=2 * BLOCK, block_size=BLOCK, dense_layers=()):
        want = model.generate(ids, **options)
        for layer in model.model.layers:
            layer.compile(backend="eager")
        assert torch.equal(model.generate(ids, **options), want)


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_model_with_windows_and_a_dynamic_cache():
    """The compiler reads the lengths of a cache as symbols."""
    model, ids = tiny_model("gemma3_text"), prompt(41)
    with seergate.attached(model, "quest", token_budget=4096, block_size=8):
        model(ids[:, :40], past_key_values=(cache := DynamicCache(config=model.config)))
        logits = torch.compile(model.forward, backend="eager")(ids[:, 40:], past_key_values=cache).logits
    torch.testing.assert_close(logits[:, -1], model(ids).logits[:, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("new", [20, 1])
@pytest.mark.parametrize("static", [False, True])
def test_a_backward_pass_through_cached_tokens_is_refused(model, new, static):
    """Their keys and values have no gradient. A text in one piece has, as in training."""
    ids, model = prompt(60), model.requires_grad_(True)
    with seergate.attached(model, "oracle", token_budget=2 * BLOCK, block_size=BLOCK):
        cache = StaticCache(model.config, max_cache_len=64) if static else DynamicCache()
        logits = model(ids[:, :40], past_key_values=cache).logits
        if not static:
            logits.sum().backward()
        later = model(ids[:, 40 : 40 + new], past_key_values=cache).logits
        refused("no gradient flows through decoded or cached tokens", later.sum().backward)
        model.requires_grad_(False)
        for layer in model.model.layers:  # as with an adapter of the values
            layer.self_attn.v_proj.weight.requires_grad_(True)
        later = model(ids[:, 59:], past_key_values=cache).logits
        refused("no gradient flows through decoded or cached tokens", later.sum().backward)
