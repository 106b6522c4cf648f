"""Static caches: decoded eagerly like any other, and compiled as one graph in which the host knows no lengths."""

import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, DynamicCache, StaticCache

import seergate
from seergate import methods
from seergate.cache.forward import CACHE, ForwardContext, ForwardMode, ForwardModes
from seergate.cache.layer import GatedLayer
from seergate.cache.rows import Rows
from seergate.cache.storage import DynamicStorage
from seergate.decode.stats import DecodeStats
from seergate.decode.step import gated_attention
from seergate.methods.base import Step
from seergate.models import hooks as call
from seergate.ops import backend
from tests.decode.test_decode import BLOCK, gates
from tests.support.decoding import Decoding
from tests.support.models import left_padded, prompt, tiny_model
from tests.support.operators import Operators
from tests.support.running import ROOT, refused

FIGURES = (
    *("steps", "density", "density_per_layer", "blocks_per_head", "tokens_per_head", "resident_tokens_per_layer"),
    *("bytes_read_per_step", "bytes_scored_per_step", "bytes_dense_per_step"),
)


def same_figures(got, want):
    for figure in FIGURES:
        torch.testing.assert_close(torch.tensor(got[figure]), torch.tensor(want[figure]), msg=figure)


def compiled(backend: str) -> dict[str, object]:
    """Options of `generate`."""
    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True  # transformers compiles on GPUs only unless it is told to
    return {"cache_implementation": "static", "compile_config": config}


def decoded_as_one_graph(model, method, inputs, **options):
    """Decode on a dynamic cache and a static one, there eagerly and compiled: tokens and figures are the same, and
    every step is the same graph without breaks. Returns the figures."""
    torch._dynamo.reset()
    counters.clear()
    results = []
    for way in ({}, {"cache_implementation": "static"}, compiled("eager")):
        with seergate.attached(model, method, **options) as handle:
            for _ in range(2):
                handle.reset_stats()
                sequences = model.generate(**inputs, max_new_tokens=14, **way)
            results.append((sequences, handle.stats()))
    for tokens, figures in results[1:]:
        assert torch.equal(tokens, results[0][0])
        same_figures(figures, results[0][1])
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    return results[0][1]


def choices(model, budget=2 * BLOCK):
    bank = gates(model, gate_dim=model.get_decoder().layers[-1].self_attn.head_dim)
    return {
        "gate": methods.Gate(bank=bank, token_budget=budget),
        "gate, sinks": methods.Gate(bank=bank, token_budget=budget + BLOCK, sink_blocks=1, dense_layers=(0,)),
        "gate, threshold": methods.Gate(bank=bank, threshold=0.05),
        "gate, top-p": methods.Gate(bank=bank, top_p=0.8),
        "quest": methods.Quest(token_budget=budget, block_size=BLOCK, dense_layers=()),
        "dense": methods.Dense(),
    }


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "qwen3_5_text"])
def test_steps_on_a_static_cache_are_ordinary_steps(family, monkeypatch):
    """Alone and in a ragged batch, over block borders; eagerly, and with the operations of a compiled step."""
    model = tiny_model(family)
    for inputs in ({"input_ids": prompt(29)}, left_padded([prompt(13, 1), prompt(29, 2), prompt(2, 3)])):
        for name, method in choices(model).items():
            if family != "qwen3" and name not in ("gate", "quest"):
                continue
            runs = []
            for static, unseen in ((False, False), (True, False), (True, True)):
                options = {"cache_implementation": "static"} if static else {}
                monkeypatch.setattr(call, "is_compiling", lambda unseen=unseen: unseen)
                options |= {"return_dict_in_generate": True, "output_logits": True}
                with seergate.attached(model, method) as handle:
                    out = model.generate(**inputs, max_new_tokens=14, **options)
                    runs.append((out.sequences, torch.stack(out.logits), handle.stats()))
            want, logits, figures = runs[0]
            for got, static_logits, static_figures in runs[1:]:
                assert torch.equal(got, want), name
                torch.testing.assert_close(static_logits, logits, rtol=2e-4, atol=2e-4)
                same_figures(static_figures, figures)


@pytest.mark.parametrize("unseen", [False, True])
def test_the_host_knows_the_lengths_but_in_compiled_steps(model, monkeypatch, unseen):
    seen, attend = [], DynamicStorage.attend

    def spied(storage, step, *to):
        seen.append(step.rows.host)
        return attend(storage, step, *to)

    monkeypatch.setattr(call, "is_compiling", lambda: unseen)
    monkeypatch.setattr(DynamicStorage, "attend", spied)
    with seergate.attached(model, gates(model), token_budget=2 * BLOCK) as handle:
        for _ in range(2):
            model.generate(input_ids=prompt(30), max_new_tokens=5, cache_implementation="static")
            memory = handle.stats()
            assert memory["state_bytes"] > 0 and memory["resident_bytes_peak"] == memory["resident_bytes_mean"]
            handle.reset_stats()
    assert seen == 2 * [None if unseen else [length] for length in range(31, 35) for _ in range(2)]


def test_a_last_chunk_of_one_token_is_not_decoded_in_compiled_code(model, monkeypatch):
    """On a cache that a compiled step has filled."""
    monkeypatch.setattr(call, "is_compiling", lambda: True)
    ids, cache = prompt(43), StaticCache(model.config, max_cache_len=48)
    with torch.no_grad(), seergate.attached(model, "quest", token_budget=2 * BLOCK, block_size=BLOCK) as handle:
        for begin, end in ((0, 40), (40, 41), (41, 42)):
            model(ids[:, begin:end], past_key_values=cache)
        with handle.passes.prefilling(in_chunks=True):
            model(ids[:, 42:], past_key_values=cache)
        assert handle.stats()["steps"] == 2


def test_overflow_is_refused_before_the_write(monkeypatch):
    """The host counts along: the device is not asked, but after compiled steps."""
    model, device_reads = tiny_model("qwen3"), []
    see = Rows._see
    monkeypatch.setattr(Rows, "_see", lambda rows: device_reads.append(rows) or see(rows))
    with seergate.attached(model, gates(model), token_budget=2 * BLOCK):
        cache = StaticCache(model.config, max_cache_len=20)
        model(prompt(10), past_key_values=cache)
        for _ in range(10):
            model(prompt(1), past_key_values=cache)
        assert not device_reads
        monkeypatch.undo()
        kept = cache.layers[0].storage.keys.clone()
        for _ in range(2):
            refused("room for 20 tokens; 20 are there and 1 more", model, prompt(1), past_key_values=cache)
            assert torch.equal(cache.layers[0].storage.keys, kept)
            for layer in cache.layers:
                layer.crop(-1)
            with monkeypatch.context() as patch:
                patch.setattr(call, "is_compiling", lambda: True)
                model(prompt(1), past_key_values=cache)
            assert not cache.layers[0].rows._seen and cache.layers[0].rows.resident == [20]
            kept = cache.layers[0].storage.keys.clone()
        for layer in cache.layers:
            layer.crop(-2)
        model(prompt(2), past_key_values=cache)
        refused("room for 20 tokens", model, prompt(1), past_key_values=cache)


tensor = partial(torch.empty, device="meta")


@pytest.fixture
def with_triton(model, monkeypatch):
    """A method for tensors without memory, query heads, KV heads, their width; ops run in Triton."""
    pytest.importorskip("triton")
    monkeypatch.setattr(backend, "choose", lambda device: "triton")
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    method = methods.Gate(bank=gates(model).to("meta"), token_budget=2 * BLOCK)
    return method, *(getattr(model.config, name) for name in names)


def kernels_of(operation):
    """Names of the kernels that it launches."""
    from benchmarks.kernels import ahead_of_time
    from benchmarks.kernels.data_sheets import H200

    return [launch.kernel.__name__ for launch in ahead_of_time.launches(operation, H200)]


def test_what_a_step_launches_on_a_gpu(with_triton):
    """In each layer, from the new token in the cache to the attention's output; on tensors without memory."""
    method, heads, kv_heads, dim = with_triton
    q, k, stats = tensor(1, heads, 1, dim), tensor(1, kv_heads, 1, dim), DecodeStats([0])
    layer = GatedLayer(DynamicStorage(4096), method, 0, heads, None, False, True, 0, 0)
    layer.lazy_initialization(k, k)
    stats.expect_compiled(layer)
    state, keys = layer.state, layer.storage.keys
    step = Step(q, k, q, k, [], [], keys, keys, tensor(1, dtype=torch.int64), 1.0)

    def decode():
        state.append(step)
        selection = method.select(state, step)
        stats.record_compiled(0, step, selection)
        DynamicStorage.attend(None, step, selection, BLOCK)

    with torch.no_grad(), Operators() as others:
        kernels = kernels_of(decode)
    assert kernels == ["update_kernel", "score_kernel", "select_kernel", "decode_kernel"]
    assert others.launches == ["ones_like", "scatter_add_", "add_"]


def test_what_an_eager_step_launches_on_a_gpu(with_triton, monkeypatch):
    """A layer after the first, whose lengths it shares, with Triton and its statistics: eight launches."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # knows no tensors without memory
    method, heads, kv_heads, dim = with_triton
    layers = [GatedLayer(DynamicStorage(), method, i, heads, None, False, False, i, i) for i in range(2)]
    observer = SimpleNamespace(stats_=DecodeStats([0, 1]), measure_recall=False, trace=None)
    passes = ForwardModes(decodes_drafts=True)

    def attend(new, layer):
        q, k, positions = tensor(1, heads, new, dim), tensor(1, kv_heads, new, dim), tensor(1, new, dtype=torch.int64)
        context = ForwardContext(ForwardMode(int(new == 1)), None, None if new > 1 else positions, q, passes=passes)
        context.take(q, k)
        gated_attention(observer, layer, context, lambda q, *_: (q.transpose(1, 2), None), q, k, k, None)

    def steps():
        for new in (8 * BLOCK, 1):
            passes.begin(layers[0].rows.slots)
            for layer in layers:
                attend(new, layer)
        passes.begin(layers[0].rows.slots)
        attend(1, layers[0])

    with torch.no_grad():
        kernels_of(steps)
        with Operators() as others:
            kernels = kernels_of(lambda: attend(1, layers[1]))
    assert kernels == ["update_kernel", "score_kernel", "select_kernel", "decode_kernel"]
    assert others.launches == ["copy_", "copy_", "sum", "add"]  # key, value; the blocks that were read


@pytest.mark.parametrize("name", ["gate", "quest", "dense"])
def test_counters_that_change_under_a_static_cache(model, name):
    """Reset, another handle, another cache of the same handle in between: tokens and figures of a dynamic cache."""
    method, ids = choices(model)[name], prompt(60, 3)
    runs = []
    with torch.no_grad():
        for make in (DynamicCache, lambda: StaticCache(model.config, max_cache_len=70)):
            cache, other, logits, figures = make(), make(), [], []

            def take(rows, new, tokens, logits=logits):
                logits.append(model(input_ids=ids[:, :new].expand(rows, -1), past_key_values=tokens).logits[:, -1])

            with seergate.attached(model, method) as handle:
                for _ in range(2):
                    take(1, 29, cache)
                    for _ in range(3):
                        take(1, 1, cache)
                    figures.append(handle.stats())
                    handle.reset_stats()
                    for _ in range(2):
                        take(1, 1, cache)
                    figures.append(handle.stats())
                    if cache.layers[0].static_length is not None:
                        cache.reset()
                    else:
                        cache = make()
                take(1, 29, cache)
                take(2, 13, other)
                for rows, tokens in ((1, cache), (2, other), (2, other), (1, cache), (1, cache)):
                    take(rows, 1, tokens)
                figures.append(handle.stats())
            with seergate.attached(model, method) as again:
                for _ in range(3):
                    take(1, 1, cache)
            runs.append((logits, [*figures, handle.stats(), again.stats()]))
            assert again.stats()["steps"] == 3
    for got, want in zip(runs[1][0], runs[0][0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    for got, want in zip(runs[1][1], runs[0][1], strict=True):
        same_figures(got, want)


def test_generate_goes_on_with_a_static_cache_under_another_handle(model):
    """Eagerly and compiled; counters that are reset while it runs do not end the graph."""
    method, first = choices(model)["gate"], prompt(29)
    torch._dynamo.reset()
    counters.clear()

    def run(cache, **options):
        with seergate.attached(model, method):
            half = model.generate(first, max_new_tokens=8, past_key_values=cache, **options)
        with seergate.attached(model, method) as handle:

            def reset(ids, scores, **_):
                if ids.shape[1] == 29 + 8 + 4:
                    handle.reset_stats()
                return False

            whole = model.generate(half, max_new_tokens=9, past_key_values=cache, stopping_criteria=[reset], **options)
            return whole, handle.stats()

    want, figures = run(DynamicCache())
    for options in ({}, {"compile_config": compiled("eager")["compile_config"]}):
        got, static_figures = run(StaticCache(model.config, max_cache_len=60), **options)
        assert torch.equal(got, want), options
        same_figures(static_figures, figures)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.slow
def test_generate_compiles_a_step_as_one_graph_without_breaks(model):
    """One graph serves every step, both banks of gates and a second handle; outputs and figures are the eager ones."""
    inputs = left_padded([prompt(13, 1), prompt(29, 2)])
    torch._dynamo.reset()
    counters.clear()
    sequences = []
    for method in (choices(model)["gate"], methods.Gate(bank=gates(model), token_budget=2 * BLOCK)):
        for _ in range(2):
            with seergate.attached(model, method) as handle:
                want, eager = model.generate(**inputs, max_new_tokens=14), handle.stats()
                handle.reset_stats()
                got, figures = model.generate(**inputs, max_new_tokens=14, **compiled("eager")), handle.stats()
            assert torch.equal(got, want)
            same_figures(figures, eager)
            sequences.append(got)
    assert torch.equal(sequences[0], sequences[1]) and not torch.equal(sequences[0], sequences[2])
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    # The plain model is not given the graph with the gates in it, nor the other way round.
    plain = model.generate(**inputs, max_new_tokens=14)
    assert not torch.equal(plain, want)
    assert torch.equal(model.generate(**inputs, max_new_tokens=14, **compiled("eager")), plain)
    with seergate.attached(model, method):
        assert torch.equal(model.generate(**inputs, max_new_tokens=14, **compiled("eager")), want)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["gate", "quest", "dense"])
def test_compiled_code_gives_the_eager_tokens(name):
    model = tiny_model("qwen3", num_hidden_layers=1)
    inputs = left_padded([prompt(13, 1), prompt(29, 2)])
    with seergate.attached(model, choices(model)[name]):
        want = model.generate(**inputs, max_new_tokens=14)
        assert torch.equal(model.generate(**inputs, max_new_tokens=14, **compiled("inductor")), want)


def test_cache_operations(model):
    """Crop, reorder, further prompts and reset, between fixed steps: as on a dynamic cache."""
    ids, results = prompt(60, 3).expand(2, -1), []
    with seergate.attached(model, choices(model)["gate"]):
        static = StaticCache(model.config, max_cache_len=120)
        for cache in (DynamicCache(), static, static):
            if cache is static:
                cache.reset()
            rows, at, logits = Decoding(model, **left_padded([prompt(40, 1), prompt(23, 2)]), cache=cache), 0, []
            for size, crop, reorder in (
                *((1, 0, False), (1, 0, False), (1, 2, False), (1, 0, True), (1, 0, False)),
                *((40, 0, False), (1, 0, False), (3, 0, False), (1, 1, False), (1, 0, False)),
            ):
                logits.append(rows.read(ids[:, at : at + size]))
                at += size
                if crop:
                    rows.crop(crop)
                if reorder:
                    rows.take([1, 0])
            results.append(torch.cat(logits, 1))
    assert all(layer.is_compileable for layer in static.layers)
    for got in results[1:]:
        torch.testing.assert_close(got, results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text", "cohere2"])
@torch.no_grad()
def test_slots_that_are_not_written_are_hidden_from_layers_that_are_not_gated_and_from_the_plain_model(family):
    """Under methods whose steps do not compile, with a window that is longer than the cache."""
    model, ids = tiny_model(family, sliding_window=64), prompt(38).split([30, *[1] * 8], 1)

    def logits(cache):
        return torch.cat([model(each, **{CACHE: cache}).logits[:, -1:] for each in ids], 1)

    plain = logits(DynamicCache(config=model.config))
    for method in (methods.Oracle(token_budget=4096), methods.H2O(token_budget=4096)):
        static = StaticCache(model.config, max_cache_len=50)
        with seergate.attached(model, method):
            torch.testing.assert_close(logits(static), plain, rtol=1e-4, atol=1e-4)
        static.reset()
        torch.testing.assert_close(logits(static), plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("indices", [[1], [0, 0, 1, 1, 1]])
def test_rows_may_become_fewer_or_more(model, indices):
    """As on a dynamic cache, what is counted of them too."""
    method, ids, logits, stats = choices(model)["gate"], prompt(20, 3), [], []
    for cache in (DynamicCache(), StaticCache(model.config, max_cache_len=100)):
        with seergate.attached(model, method) as handle, torch.no_grad():
            rows = Decoding(model, torch.cat((prompt(40, 1), prompt(40, 2))), cache=cache)
            for i in range(3):
                rows.read(ids[:, i, None].expand(2, 1))
            for layer in cache.layers:
                layer.batch_select_indices(torch.tensor(indices))
            rows.mask = rows.mask[indices]
            handle.reset_stats()
            logits.append(torch.cat([rows.read(ids[:, i, None].expand(len(indices), 1)) for i in range(3, 9)], 1))
            stats.append(handle.stats())
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    for name in ("resident_tokens_per_layer", "tokens_per_head", "density"):
        assert stats[0][name] == stats[1][name], name


def test_recall_and_other_methods_on_a_static_cache(model):
    """What needs the host at each step is decoded in ordinary steps."""
    inputs = {"input_ids": prompt(30)}
    for method in (choices(model)["gate"], methods.Oracle(token_budget=2 * BLOCK, block_size=BLOCK)):
        runs = []
        for options in ({}, {"cache_implementation": "static"}):
            with seergate.attached(model, method, measure_recall=True) as handle:
                tokens = model.generate(**inputs, max_new_tokens=12, **options)
                runs.append((tokens, handle.stats()["recall_per_layer"]))
        assert torch.equal(runs[0][0], runs[1][0]) and runs[0][1] == pytest.approx(runs[1][1])


@pytest.mark.parametrize(
    "method",
    [
        methods.Oracle(token_budget=2 * BLOCK, block_size=BLOCK),
        methods.ReSA(token_budget=2 * BLOCK, block_size=BLOCK, rectify_every=4),
        methods.Quest(token_budget=2 * BLOCK, block_size=BLOCK, dense_layers=(), group_reduction="separate"),
        methods.H2O(token_budget=2 * BLOCK),
    ],
    ids=lambda method: method.name,
)
def test_generate_does_not_compile_steps_that_need_the_host(model, method):
    torch._dynamo.reset()
    counters.clear()
    with seergate.attached(model, method):
        want = model.generate(prompt(30), max_new_tokens=12)
        for _ in range(2):
            assert torch.equal(model.generate(prompt(30), max_new_tokens=12, **compiled("eager")), want)
    assert not counters["stats"]
    model.generate(prompt(30), max_new_tokens=3, **compiled("eager"))
    assert counters["stats"]["unique_graphs"] == 1, "detached, the model compiles as before"


def test_generate_does_not_compile_layers_whose_keys_later_layers_read():
    torch._dynamo.reset()
    counters.clear()
    model = tiny_model("gemma4_text")
    with seergate.attached(model, "quest", token_budget=2 * BLOCK, block_size=BLOCK):
        model.generate(prompt(30), max_new_tokens=3, **compiled("eager"))
    assert not counters["stats"]


@pytest.mark.slow
def test_the_first_sparse_step_of_a_process_may_be_a_compiled_one():
    """A compiler cannot import what computes an op; in this process, earlier tests have imported it."""
    code = """
import seergate
from tests.decode.test_static import BLOCK, compiled, prompt, tiny_model
model = tiny_model("qwen3", num_hidden_layers=1)
with seergate.attached(model, "quest", token_budget=2 * BLOCK, block_size=BLOCK, dense_layers=()) as handle:
    model.generate(input_ids=prompt(60), max_new_tokens=3, **compiled("eager"))
    assert handle.stats()["density"] < 1
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
