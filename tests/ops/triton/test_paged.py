"""The kernels of a decode step over pages against the same step in PyTorch, `seergate.serving.vllm`'s own."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from seergate import GateConfig
from seergate.gates.gate import AttnGate
from seergate.methods import make_method
from seergate.ops.gate_math import Branch
from seergate.ops.triton_impl import selection
from seergate.serving.vllm import decode_kernels as paged
from seergate.serving.vllm.attention import Counts, SparseAttention, plan_of_decodes
from seergate.serving.vllm.pages import FlashPages
from tests.support.models import gate_scores, geometry

K, G, D, WIDTH = 2, 5, 16, 8
LENGTHS = (128, 100, 32, 0, 96, 7)
"""Blocks of 32: closes its fourth, is open, closes its first, is padding, closes its third, is one open block."""


class Case:
    """Rows of `LENGTHS` tokens in pages, with what earlier batches left in the table behind the rows' own pages."""

    def __init__(self, page: int, device: torch.device, *, rotary: int, neox: bool, dtype: torch.dtype, **gate: Any):
        angles = torch.arange(WIDTH * page)[:, None] * torch.rand(rotary // 2)
        table = torch.cat((1.3 * angles.cos(), 1.3 * angles.sin()), -1).to(device) if rotary else None
        self.page, self.rope = page, (table, neox)
        rope: Any = None
        if rotary:
            rope = torch.nn.Module()
            rope.cos_sin_cache, rope.is_neox_style = table, neox
        config = GateConfig(block_size=32, gate_dim=24, **gate)
        frequencies = torch.rand(12) if config.rope else ()
        made = AttnGate(config, geometry(K * G, K, D, inv_freq=frequencies, attention_scaling=0.7))
        for weight in made.parameters():
            weight.data.normal_(std=0.5)
        self.gate = made.requires_grad_(False).to(device, dtype)
        self.twin = gate_scores(self.gate, rope)
        pages = len(LENGTHS) * WIDTH + 1
        self.lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
        own = torch.randperm(pages - 1).view(len(LENGTHS), WIDTH).int() + 1
        stale = torch.randint(1, pages, own.shape).int()
        used = torch.arange(WIDTH) < -(-torch.tensor(LENGTHS) // page)[:, None]
        self.table = torch.where(used, own, stale).to(device)
        self.table[self.lengths == 0] = 0
        memory = torch.randn(pages, page, K, 2 * D).transpose(1, 2).to(device, dtype)  # tokens before heads
        self.cache, self.summary = memory, torch.randn(pages, K, 24).to(device, dtype)

    def weights(self, branch: str) -> tuple[Tensor, Tensor | None]:
        norm = getattr(self.gate, f"{branch}_norm").weight if self.gate.config.qk_norm else None
        return getattr(self.gate, f"{branch}_proj").weight, norm

    @property
    def plan(self) -> Any:
        metadata = SimpleNamespace(seq_lens=self.lengths, block_table=self.table)
        return plan_of_decodes(metadata, make_method("quest", token_budget=64, block_size=32), self.page)


@pytest.fixture(
    params=[
        {"page": 32, "rotary": 16, "neox": True},
        {"page": 16, "rotary": 16, "neox": False},
        {"page": 16, "rotary": 8, "neox": True, "k_pooling": ("avg", "max")},
        {"page": 32, "rotary": 0, "neox": True, "rope": False, "qk_norm": False},
    ],
    ids=str,
)
def case(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setenv("SEERGATE_BACKEND", "torch")  # of the twin
    return Case(device=device, dtype=torch.float32, **request.param)


def test_only_blocks_that_close_get_a_compressed_key(case: Case) -> None:
    rows, plan = [row for row, length in enumerate(LENGTHS) if length and length % 32 == 0], case.plan
    pages = plan.closed_Cr[rows]
    keys = case.cache[pages][..., :D].transpose(1, 2).flatten(2, 3)
    want = case.summary.clone()
    want[pages[:, -1]] = case.twin.summary(keys, plan.starts_C[rows])
    branch, kinds = Branch(*case.weights("k"), case.gate.inv_freq, 0.7), case.gate.config.k_pooling
    paged.close_blocks(case.cache, case.summary, case.table, case.lengths, *case.rope, branch, 32, kinds)
    torch.testing.assert_close(case.summary, want, rtol=1e-5, atol=1e-5)


def test_scores_and_places(case: Case) -> None:
    """Scores of complete blocks, NaN in summaries of others; what is selected; a query with gaps."""
    plan, method = case.plan, make_method("quest", token_budget=96, block_size=32)
    rows = plan.rows
    last_RN = rows.table_RNr[..., -1]
    query = torch.randn(len(LENGTHS), K * G + 3, D, device=case.cache.device)[:, : K * G]
    want = case.twin.scores(query, rows, case.summary[last_RN].transpose(1, 2))
    complete = torch.arange(want.shape[2], device=want.device) < (case.lengths // 32)[:, None]
    used = torch.zeros(len(case.summary), dtype=torch.bool)
    used[last_RN[complete].cpu()] = True
    case.summary[~used] = torch.nan
    given = *case.rope, Branch(*case.weights("q"), case.gate.inv_freq, 0.7), 32, case.page
    scores, packed = paged.score_pages(query, case.summary, case.table, case.lengths, *given)
    torch.testing.assert_close(packed, query.reshape(-1, G, D), rtol=0, atol=0)
    torch.testing.assert_close(scores, want.where(complete[:, None], 0.0), rtol=1e-5, atol=1e-5)

    indices, counts = method.choose(scores, rows)
    tokens_wanted = (counts - 1) * 32 + (rows.tensor[:, None] - 1) % 32 + 1
    places, tokens = paged.selected_block_table(scores, case.table, case.lengths, 32, case.page, 96, 0, 7, 3)
    assert torch.equal(tokens.view(-1, K), tokens_wanted.int())
    run = 32 // case.page
    for row in range(len(LENGTHS)):
        for head in range(K):
            chosen = [int(i) for i in indices[row, head] if i >= 0]
            pages = rows.table_RNr[row, chosen].flatten() * 7 + head * 3
            got = places.view(len(LENGTHS), K, -1)[row, head]
            assert got.tolist() == pages.tolist() + [0] * (3 * run - len(pages))


class InPyTorch(FlashPages):
    """Attention without FlashAttention."""

    def schedule(self, query_QGD: Tensor, table_QX: Tensor, lengths_Q: Tensor) -> Any:
        return None

    def attend(self, query_QGD: Any, table_QX: Any, lengths_Q: Any, schedule: Any, output_QGD: Any) -> None:
        keys, values = (x[table_QX.long()].flatten(1, 2)[:, :, 0] for x in (self.keys, self.values))
        beyond = torch.arange(keys.shape[1], device=keys.device) >= lengths_Q[:, None]
        scores = (query_QGD @ keys.transpose(1, 2)).masked_fill(beyond[:, None], -torch.inf)
        output_QGD.copy_(scores.softmax(-1) @ values)


def test_steps_in_kernels_are_steps_in_pytorch(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers that share a plan, with room for summaries behind each page; and a table too long for the kernels."""
    pages, numbers = len(case.cache), K * case.page * 2 * D + K * 24
    memories = [torch.randn(pages * numbers, device=case.cache.device) for _ in range(2)]
    queries = [torch.randn(len(LENGTHS), K * G + 3, D, device=case.cache.device)[:, : K * G] for _ in memories]
    impl = type("Impl", (SparseAttention,), {"kind": InPyTorch, "scoring": case.twin})()
    impl.method = make_method("quest", token_budget=96, block_size=32)
    impl.pages, impl.anchor = WeakTensorKeyDictionary(), impl

    def run() -> list[Tensor]:
        impl.counts = Counts(*torch.zeros(2, dtype=torch.long, device=case.cache.device))
        metadata = SimpleNamespace(plan=None, seq_lens=case.lengths, block_table=case.table)
        tensors = []
        for memory, query in zip(memories, queries, strict=True):
            used, output = memory.clone(), torch.zeros_like(query).contiguous()
            cache = used.as_strided((pages, K, case.page, 2 * D), (numbers, case.page * 2 * D, 2 * D, 1))
            impl.forward(None, query, query, query, cache, metadata, output)
            used.view(pages, -1)[0] = 0  # nobody's
            tensors += [used, output[case.lengths > 0]]
        return [*tensors, impl.counts.read, impl.counts.held]

    expected = run()
    monkeypatch.setenv("SEERGATE_BACKEND", "triton")
    for most in (16384, 3):  # blocks that the selection's kernel takes
        for module in (selection, paged):
            monkeypatch.setattr(module, "MAX_BLOCKS", most)
        for got, want in zip(run(), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
