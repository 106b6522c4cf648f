"""The Python of the README and of the page on gates runs as it is printed, on the shipped model."""

from __future__ import annotations

from pathlib import Path

import pytest

from seergate import GateBank, GateConfig
from seergate.hf.loading import load_base
from tests.test_house import ROOT, code_blocks

BLOCKS = [block for page in ("README.md", "docs/gates.md") for block in code_blocks(ROOT / page, "python")]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a reader stands who has run `python train.py --model tiny-reasoner`; the gates are untrained, though."""
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    model = load_base(ROOT / "checkpoints" / "tiny-reasoner")
    bank = GateBank.for_model(model, GateConfig(block_size=16, gate_dim=32))
    bank.save_pretrained(tmp_path / "runs" / "tiny-reasoner-gates")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_are_snippets() -> None:
    assert len(BLOCKS) >= 3


@pytest.mark.parametrize("block", BLOCKS, ids=[f"snippet{i}" for i in range(len(BLOCKS))])
def test_snippets_run(block: str, checkout: Path) -> None:
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
