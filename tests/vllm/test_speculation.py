"""Drafts inside vLLM: steps that verify several tokens read everything, and rejected tokens leave nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from seergate.vllm.attention import SparseAttention
from tests.reasoner import questions
from tests.vllm.conftest import GATES, answers, engine, gated_layers

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
SIZE, NEW = 32, 300


def test_drafts_that_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step leaves each complete block's compressed key as its cached keys, drafts included, make it; and a rule
    that leaves nothing out says what the dense model says.
    """
    plain, verified, checked = SparseAttention.forward, [], []

    def forward(
        self: Any, layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, **rest: Any
    ) -> Any:
        output = plain(self, layer, query, key, value, cache, metadata, **rest)
        if metadata is not None:
            verified.append(metadata.max_query_len in (2, 3, 4) and not metadata.plan.rows.lengths_R.numel())
            for length, pages in zip(metadata.seq_lens.tolist(), metadata.block_table.long(), strict=True):
                closed = pages[: length // SIZE]
                if len(closed):
                    keys = self._keys(self.pages[cache], closed[:, None])
                    want = self.scoring.summary(keys, torch.arange(len(closed)) * SIZE)
                    torch.testing.assert_close(self.pages[cache].summary_PKW[closed], want, rtol=1e-4, atol=1e-4)
                    checked.append(len(closed))
        return output

    prompts = questions(12, 20)
    with engine() as llm:
        dense = answers(llm, prompts, NEW)
        del llm  # its end takes vLLM's process groups with it
    monkeypatch.setattr(SparseAttention, "forward", forward)
    rule = {"gates": GATES, "threshold": 1e-30}
    options = {"speculative_config": NGRAM, "async_scheduling": False, "disable_log_stats": False}
    with engine(seergate=rule, **options) as llm:
        assert answers(llm, prompts, NEW) == dense
        counts = {
            metric.name: metric.value
            for metric in llm.get_metrics()
            if metric.name.endswith("_tokens") and hasattr(metric, "value")
        }
        assert gated_layers(llm)
    assert any(verified) and max(checked) > 4
    assert 0 < counts["vllm:spec_decode_num_accepted_tokens"] < counts["vllm:spec_decode_num_draft_tokens"]
