"""Code for GPUs, without one: vLLM's callers and cache layouts, a recorded and replayed decode step, temporaries."""

import gc
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.weak import WeakTensorKeyDictionary
from vllm.config import AttentionConfig
from vllm.v1.attention.backend import AttentionCGSupport as Support
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheTensor, compute_layout_strides, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture
from vllm.v1.worker.gpu.input_batch import InputBuffers
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.utils import AttentionGroup

from benchmarks.estimates import LAUNCHES
from seergate import GateConfig
from seergate.gates.gate import AttnGate
from seergate.methods import SelectingMethod, make_method
from seergate.serving.common.rows import PagedRows
from seergate.serving.common.scoring import QuestScores, Scores
from seergate.serving.vllm import attention
from seergate.serving.vllm.checks import choose_backend
from seergate.serving.vllm.pages import FlashPages
from tests.serving.vllm.flash import use_kernels
from tests.support.models import gate_scores, geometry
from tests.support.operators import Operators
from tests.support.running import refused

K, G, D, E = 2, 2, 16, 16
QUEST = make_method("quest", token_budget=64, block_size=32)


@pytest.fixture(autouse=True)
def _flash(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch)


class Rotary:
    """vLLM's table of angles."""

    is_neox_style = True

    def __init__(self, positions: int) -> None:
        angles = torch.arange(positions)[:, None] * torch.rand(D // 2)
        self.cos_sin_cache = torch.cat((angles.cos(), angles.sin()), -1)


def gate(size: int) -> AttnGate:
    made = AttnGate(GateConfig(block_size=size, gate_dim=E), geometry(K * G, K, D, inv_freq=torch.rand(E // 2)))
    for weight in made.parameters():
        weight.data.normal_(std=0.5)
    return made.requires_grad_(False)


def quest_scores(head_dim: int = D, dtype: torch.dtype = torch.float32) -> Scores:
    return QuestScores(QUEST, head_dim, dtype, 1.0, 0.0, None, None)


class FlashImpl(attention.SparseAttention):
    """With the attributes that `FlashPages` reads."""

    kind, scale, logits_soft_cap, vllm_flash_attn_version, num_kv_heads = FlashPages, D**-0.5, 0, 3, K


def gated_layer(method: SelectingMethod, scoring: Scores) -> attention.SparseAttention:
    impl = FlashImpl()
    impl.method, impl.scoring, impl.anchor = method, scoring, impl
    impl.counts, impl.pages = attention.Counts(*torch.zeros(2, dtype=torch.long)), WeakTensorKeyDictionary()
    return impl


def cache_in(memory: Tensor, page: int, width: int) -> Tensor:
    """A layer's cache ``[pages, K, page, 2 * D]``, each page followed by its summary."""
    numbers = K * page * 2 * D + K * width
    return memory.as_strided((len(memory) // numbers, K, page, 2 * D), (numbers, page * 2 * D, 2 * D, 1))


def memory_of(pages: int, page: int, width: int, draw: torch.Generator | None = None) -> Tensor:
    return torch.randn(pages * (K * page * 2 * D + K * width), generator=draw)


class Stock(AttentionMetadataBuilder):
    """A builder of vLLM's own kind."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        common = common_attn_metadata
        lengths, starts = common.seq_lens, common.query_start_loc
        return SimpleNamespace(block_table=common.block_table_tensor, seq_lens=lengths, query_start_loc=starts)


class Backend(attention.SparseBackend, FlashAttentionBackend):
    """FlashAttention's, read sparsely."""


@dataclass
class StockLayer:
    """vLLM's attention module with pages of ``size`` tokens."""

    size: int

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return FullAttentionSpec(block_size=self.size, num_kv_heads=K, head_size=D, dtype=torch.float32)


def builder(method: SelectingMethod, page: int, room: int = 0, drafts: int = 0, anchor: Any = None) -> Any:
    """The builder of a model with one gated layer and one that is none."""
    layer = attention.sparse_layer(StockLayer)(page)
    layer.impl = gated_layer(method, quest_scores())
    layer.impl.anchor = anchor or layer.impl
    spec, layers = layer.get_kv_cache_spec(None), {"layer": layer, "other": None}
    if room:
        spec = replace(spec, page_size_padded=spec.unpadded_page_size_bytes + room)
    config = SimpleNamespace(num_speculative_tokens=drafts, model_config=SimpleNamespace(max_model_len=2048))
    config.compilation_config = SimpleNamespace(static_forward_context=layers)
    kind = type("Builder", (attention.SparseBuilder, Stock), {})
    made = kind(spec, ["layer"], config, torch.device("cpu"))  # type: ignore[call-arg]
    support = kind.get_cudagraph_support(config, spec)
    assert support == (Support.UNIFORM_SINGLE_TOKEN_DECODE if made.graphs else Support.NEVER)
    return made


@pytest.mark.usefixtures("on_gpu")
def test_drafts_are_planned_in_the_graph() -> None:
    """vLLM calls the builder by its names for a step, too: in engines, and in `captured`."""
    drafting = SimpleNamespace(max_query_len=1, block_table_tensor=None, seq_lens=None, query_start_loc=None)
    assert builder(QUEST, 32).build_for_drafting(drafting, 0).plan is None


@pytest.mark.parametrize(
    ("page", "options", "sentence"),
    [
        (64, {}, "pages of 64 tokens; with seergate a block of 32 must be several"),
        (32, {"room": 16}, "vLLM's pages have 16 bytes behind .*; seergate's summaries need 256"),
        (32, {"anchor": SimpleNamespace()}, r"anchors is \[2\]; vLLM's cache has layers in groups with pages of"),
    ],
)
def test_caches_that_do_not_fit_are_refused(page: int, options: dict[str, Any], sentence: str) -> None:
    refused(sentence, builder, make_method("quest", token_budget=64, block_size=32, anchors=(2,)), page, **options)


def test_a_cache_with_more_places_than_int32_holds_is_refused() -> None:
    far = torch.empty(2**23, 2, 16, 32, device="meta").as_strided((2**23, 2, 16, 32), (2**10, 2, 32, 1))
    refused("places of pages; a block table holds numbers below 2\\^31", FlashPages, None, None, far)


def test_the_cache_that_vllm_profiles_with_is_let_go() -> None:
    """vLLM drops its references and wants the memory for the real cache; all layers share one allocation."""
    layers = [gated_layer(QUEST, quest_scores()) for _ in range(3)]
    buffer, query = memory_of(3 * 5, 32, 2 * D), torch.randn(1, K * G, D)
    place = buffer.untyped_storage().data_ptr()
    lengths, table = torch.tensor([128], dtype=torch.int32), torch.tensor([[1, 2, 3, 4]], dtype=torch.int32)
    for layer, memory in zip(layers, buffer.chunk(3), strict=True):
        metadata = SimpleNamespace(plan=None, seq_lens=lengths, block_table=table)
        cache = cache_in(memory, 32, 2 * D)
        layer.forward(SimpleNamespace(), query, query, query, cache, metadata, torch.empty_like(query))
    del buffer, cache, memory
    gc.collect()
    alive = [x for x in gc.get_objects() if type(x) is Tensor and x.untyped_storage().data_ptr() == place]
    assert not alive


@pytest.mark.usefixtures("on_gpu")
def test_flash_attention_is_chosen_before_weights_are_loaded_and_others_are_refused() -> None:
    config = AttentionConfig()
    choose_backend(config)
    assert config.backend_per_kind == {"full_attention": AttentionBackendEnum.FLASH_ATTN}
    other = AttentionBackendEnum.FLASHINFER
    for given in (AttentionConfig(backend=other), AttentionConfig(backend_per_kind={"full_attention": other})):
        refused("attention backend is FLASHINFER; with seergate it must be FLASH_ATTN", choose_backend, given)


@pytest.mark.parametrize("kind", ["gate", "quest"])
def test_scores_of_many_long_rows_take_bounded_memory(kind: str) -> None:
    """1,024 rows of 131,072 tokens, eight KV heads of 128 channels, on meta tensors."""
    rows, blocks, size, heads, dim = 1024, 2048, 64, 8, 128
    scoring = quest_scores(dim, torch.bfloat16)
    if kind == "gate":
        config, shape = GateConfig(size, gate_dim=dim), geometry(4 * heads, heads, dim, inv_freq=[1.0] * (dim // 2))
        made = AttnGate(config, shape).requires_grad_(False).to("meta", torch.bfloat16)
        scoring = gate_scores(made, None)
    layer = gated_layer(make_method("quest", token_budget=4096, block_size=size), scoring)
    with torch.device("meta"):
        numbers = heads * (size * 2 * dim + scoring.width)
        shape, strides = (5800, heads, size, 2 * dim), (numbers, size * 2 * dim, 2 * dim, 1)
        memory = torch.empty(5800 * numbers, dtype=torch.bfloat16)
        pages = FlashPages(layer, None, memory.as_strided(shape, strides), scoring.width)
        table = torch.zeros(rows, blocks, 1, dtype=torch.long)
        sparse = PagedRows(torch.zeros(rows, dtype=torch.long), table)
        query = torch.empty(rows, 4 * heads, dim, dtype=torch.bfloat16)
        with Operators() as largest:
            scores = layer._scores(pages, sparse, query)
    assert scores.shape == (rows, heads, blocks) and largest.bytes <= attention.SCORED_BYTES


def test_keys_are_made_without_a_copy_of_the_weight_per_row() -> None:
    size, rows = 32, 64
    made = gate(size)
    with Operators() as largest:
        made.keys(torch.randn(rows, K, 1, 3 * D), torch.zeros(rows, 1))
    assert largest.bytes < rows * made.k_proj.weight.nbytes


def decode_state(seed: int, rows: int, width: int, page: int, size: int) -> dict[str, Any]:
    """Rows of a decode step, the last one or two padding; behind a row's own pages, the table has stale entries."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width * page, (rows,), generator=draw).int()
    lengths[0], lengths[-1 - seed % 2 :] = size * 2, 0
    total = rows * width + 1
    table = torch.randint(1, total, (rows, width), generator=draw).int()
    own = torch.randperm(total - 1, generator=draw).view(rows, width).int() + 1
    table = torch.where(torch.arange(width) < -(-lengths // page)[:, None], own, table)
    table[lengths == 0] = 0
    return {
        "lengths": lengths,
        "table": table,
        "memory": [memory_of(total, page, E, draw) for _ in range(2)],
        "queries": [torch.randn(rows, K * G, D, generator=draw) for _ in range(2)],
        "outputs": [torch.zeros(rows, K * G, D) for _ in range(2)],
    }


def captured(method: SelectingMethod, page: int, rows: int, width: int) -> Any:
    """The metadata of the dummy batch with which vLLM's second model runner captures a graph."""
    cpu, made = torch.device("cpu"), builder(method, page)
    buffers, tables = InputBuffers(rows, rows, cpu), BlockTables([page], rows, rows, [width], cpu)
    group = AttentionGroup(Backend, ["layer"], made.kv_cache_spec, 0, metadata_builders=[made])
    state: Any = SimpleNamespace(max_model_len=width * page, supports_mm_inputs=False, encoder_cache=None)
    state.prepare_attn = partial(DefaultModelState.prepare_attn, state)
    groups: Any = SimpleNamespace(kv_cache_groups=[group])
    given = rows, rows, state, buffers, tables, [[group]], groups
    metadata = prepare_inputs_to_capture(*given, full_cudagraph=True, max_query_len=1).attn_metadata["layer"]
    assert metadata.plan is None  # the first layer makes it, so that the graph has it
    assert metadata.seq_lens.data_ptr() == buffers.seq_lens.data_ptr()
    assert metadata.block_table.data_ptr() == tables.input_block_tables[0].data_ptr()
    return metadata


@pytest.mark.parametrize(("page", "shared"), [(32, False), (16, False), (16, True)])
@pytest.mark.usefixtures("on_gpu")
def test_a_recorded_step_replayed_is_an_eager_step(page: int, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed with other lengths, tables, caches and padding; no row changes the summary of another's block."""
    from seergate.ops import arguments as checks

    monkeypatch.setattr(checks, "readable", lambda x: False)  # as for tensors on a GPU
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)  # it wants pinned memory
    size, rows, width = 32, 5, 6 * 32 // page
    method, rotary = make_method("quest", token_budget=3 * size, block_size=size), Rotary(width * page)
    layers = [gated_layer(method, gate_scores(gate(size), rotary)) for _ in range(2)]
    layers[1].anchor = layers[0] if shared else layers[1]

    def step(state: dict[str, Any]) -> list[Tensor]:
        metadata = SimpleNamespace(plan=None, seq_lens=state["lengths"], block_table=state["table"])
        counts = attention.Counts(*torch.zeros(2, dtype=torch.long))  # of both layers, which read as much
        for i, layer in enumerate(layers):
            layer.counts, query, cache = counts, state["queries"][i], cache_in(state["memory"][i], page, E)
            layer.forward(None, query, query, query, cache, metadata, state["outputs"][i])
        return [counts.read, counts.held]

    def copied(state: dict[str, Any]) -> dict[str, Any]:
        return {name: [y.clone() for y in x] if isinstance(x, list) else x.clone() for name, x in state.items()}

    with torch.no_grad():
        dummy = captured(method, page, rows, width)
        recorded = decode_state(1, rows, width, page, size) | {"lengths": dummy.seq_lens, "table": dummy.block_table}
        graph = make_fx(step)(recorded)
        for seed in range(2, 8):
            state = decode_state(seed, rows, width, page, size)
            replayed, eager = copied(state), copied(state)
            counts = graph(replayed), step(eager)
            for name in ("outputs", "memory"):
                assert all(torch.equal(a, b) for a, b in zip(replayed[name], eager[name], strict=True))
            assert [int(x) for x in counts[0]] == [int(x) for x in counts[1]]
            assert int(counts[0][1]) == K * int(state["lengths"].sum())
            closing = [row for row in range(rows) if state["lengths"][row] and state["lengths"][row] % size == 0]
            ends = {int(state["table"][row, state["lengths"][row] // page - 1]) for row in closing}
            for layer, before, after in zip(layers, state["memory"], eager["memory"], strict=True):
                caches = [cache_in(memory, page, E) for memory in (before, after)]
                assert torch.equal(*caches)
                old, new = (FlashPages(None, None, cache, E).summary_PKW for cache in caches)
                changed = (old != new).flatten(1).any(-1).nonzero().flatten().tolist()
                assert closing and set(changed) == (ends | {0} if layer.anchor is layer else set())


def test_a_decode_step_of_a_layer_is_five_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three kernels and FlashAttention's two; the first layer plans, and a layer with an anchor only attends."""
    from triton.runtime.jit import JITFunction

    names: list[str] = []
    monkeypatch.setattr("seergate.serving.common.scoring.choose", lambda device: "triton")
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *rest, **named: names.append(kernel.__name__))
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", lambda **named: names.append("attention"))
    monkeypatch.setattr(fa_utils, "get_scheduler_metadata", lambda **named: names.append("schedule"))
    state = decode_state(1, 5, 6, 32, 32)
    layers = [gated_layer(QUEST, gate_scores(gate(32), Rotary(192))) for _ in range(4)]
    layers[3].anchor = layers[2]
    counts, launches = attention.Counts(*torch.zeros(2, dtype=torch.long)), []
    metadata = SimpleNamespace(plan=None, seq_lens=state["lengths"], block_table=state["table"])
    for layer in layers:
        layer.counts, query, cache = counts, state["queries"][0], cache_in(state["memory"][0], 32, E)
        with torch.no_grad(), Operators(names):
            layer.forward(None, query, query, query, cache, metadata, state["outputs"][0])
        launches.append(list(names))
        names.clear()
    kernels = ["close_kernel", "paged_score_kernel", "place_kernel"]
    assert launches[1] == launches[2] == [*kernels, "attention"] and launches[3] == ["attention"]
    assert len(kernels) + 2 == LAUNCHES["gate"]  # as docs/scale.md counts them
    assert launches[0].count("schedule") == 1 and set(kernels) < set(launches[0]) and len(launches[0]) <= 20


@pytest.mark.parametrize("layout", attention.LAYOUTS)
def test_pages_in_each_layout_of_vllms_cache(layout: str) -> None:
    """vLLM's views with room for summaries. What attention reads in each layout is compared in test_flash.py."""
    layers, pages, size, width = 3, 7, 16, 24
    spec = FullAttentionSpec(block_size=size, num_kv_heads=K, head_size=D, dtype=torch.bfloat16)
    spec = replace(spec, page_size_padded=spec.page_size_bytes + K * width * 2)
    total = layers * pages * spec.page_size_bytes
    strides = compute_layout_strides(spec, pages, layers, KVCacheLayout[layout])
    names = [f"layer {i}" for i in range(layers)]
    place = KVCacheTensor(size=total, layers=names, layer_stride=strides[0], block_stride=strides[1])
    views = create_kv_cache_views(torch.zeros(total, dtype=torch.int8), spec, pages, KVCacheLayout[layout], place)
    contents = [torch.randn(pages, K, size, 2 * D).bfloat16() for _ in views]
    summaries = [torch.randn(pages, K, width).bfloat16() for _ in views]
    for view, values, each in zip(views, contents, summaries, strict=True):
        view.copy_(values)
        FlashPages(None, None, view, width).summary_PKW.copy_(each)
    sparse = PagedRows(torch.zeros(2, dtype=torch.long), torch.randint(pages, (2, 5, 1)))
    for view, values, each in zip(views, contents, summaries, strict=True):
        cache = FlashPages(None, None, view, width)
        assert torch.equal(cache.read_summaries(sparse), each[sparse.table_RNr[..., 0]].transpose(1, 2))
        with Operators() as largest:
            keys = cache.read(torch.arange(pages))
        assert torch.equal(keys, values[..., :D]) and largest.bytes == values.nbytes // 2


def test_vllm_is_asked_for_layouts_in_which_the_page_of_a_head_is_contiguous() -> None:
    layouts = get_supported_kv_cache_layouts([Backend, FlashAttentionBackend])
    assert [layout.name for layout in layouts] == ["LBHNC", "LBNHC", "BLHNC", "BLNHC"]
    assert attention.sparse_backend(CPUAttentionBackend).supported_kv_cache_layouts() == (KVCacheLayout.LBHNC,)
