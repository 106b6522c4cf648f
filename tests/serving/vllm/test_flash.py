"""FlashAttention's backend in engines on CPUs, in the shapes of CUDA graphs: tests of blocks and of batches again."""

from collections.abc import Iterator
from typing import Any

import pytest

from seergate.serving.vllm import attention
from tests.serving.vllm import test_speculation
from tests.serving.vllm.conftest import answers, engine, gated_layers
from tests.serving.vllm.flash import use_backend
from tests.serving.vllm.test_batches import (  # noqa: F401
    GATE,
    NEW,
    llm,
    prompts,
    test_64_ragged_requests_at_once,
    test_cached_prefixes,
    test_chunks_and_no_cached_prefixes,
    test_preemption,
    together,
)
from tests.serving.vllm.test_blocks import (  # noqa: F401
    directory,
    model,
    test_blocks_of_one_page_and_of_several,
    test_quest,
)
from tests.support.reasoner import GATES, questions


@pytest.fixture(scope="module", autouse=True)
def _flash_attention() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        use_backend(patch)
        patch.setattr(attention, "fits_graphs", lambda m, _: m.fixed_shapes and attention.same_in_all_layers(m))
        yield


@pytest.mark.parametrize("layout", attention.LAYOUTS)
def test_layouts_of_the_cache(layout: str, prompts: Any, together: Any, monkeypatch: Any) -> None:  # noqa: F811
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    with engine(seergate=GATE, max_num_seqs=4) as llm:  # noqa: F811
        assert answers(llm, prompts[:4], NEW) == together[:4]
        pages = {type(page).__name__ for layer in gated_layers(llm).values() for page in layer.impl.pages.values()}
    assert pages == {"FlashPages"}


def test_drafts() -> None:
    """Steps in which no row has drafts are planned as in a graph, all others on the host."""
    test_speculation.same_with_drafts({"gates": GATES, "token_budget": 128}, questions(12, 16, 14, 13), 60)
