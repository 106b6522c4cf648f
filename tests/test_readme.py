"""The Python blocks of the README and the documents run as printed, on the shipped model."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from seergate import GateBank
from seergate.methods import METHODS
from seergate.models.families import FAMILIES
from seergate.models.loading import load_base
from tests.test_house import ROOT, code_blocks, named

ELSEWHERE = {
    "docs/harnesses.md": "needs lighteval",
    "docs/serving.md": "needs vLLM: tests/serving/vllm",
    "docs/write_a_method.md": "tests/methods/test_new_method.py",
}
CALLS = {
    "docs/decoding.md": "seergate.handle_of(model).detach(); tokens_by_position(model, bank, prompt, Path('trace'))",
    "docs/decode-engine.md": "[run(model, bank, prompt) for run in (rounded, compiled, offloaded)]",
}
"""Code to run after the blocks of pages that define functions."""
PAGES = [
    page
    for page in map(named, (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))))
    if code_blocks(ROOT / page, "python") and page not in ELSEWHERE
]


def on_the_shipped_model(block: str) -> str:
    """The block with a small model and short answers; what is compiled is traced, but runs eagerly."""
    block = block.replace('CompileConfig(mode="default", ', 'CompileConfig(mode=None, backend="eager", ')
    block = block.replace("HuggingFaceTB/SmolLM2-135M-Instruct", "checkpoints/tiny-reasoner")
    return re.sub(r"max_new_tokens=(\d+)", lambda n: n[0] if int(n[1]) <= 500 else "max_new_tokens=40", block)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Names that the pages assume: a model, its gates and a prompt, in a checkout."""
    for name in ("checkpoints", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    inputs = AutoTokenizer.from_pretrained("checkpoints/tiny-reasoner")("[a1] 3", return_tensors="pt")
    return {
        "__name__": "page",
        "Path": Path,
        "bank": GateBank.from_pretrained("checkpoints/tiny-reasoner/gates"),
        "model": load_base("checkpoints/tiny-reasoner"),
        "inputs": {"input_ids": inputs.input_ids},
        "prompt": inputs.input_ids,
    }


@pytest.mark.parametrize("page", PAGES)
def test_python_of_a_page_runs(page: str, names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    for block in (*code_blocks(ROOT / page, "python"), CALLS.get(page, "")):
        exec(compile(on_the_shipped_model(block), page, "exec"), names)
    lines = capsys.readouterr().out.splitlines()
    if page == "README.md":
        assert any(re.fullmatch(r"0\.\d+", line) for line in lines), "the first example prints how little it reads"
    for line in lines:
        if " expected " in line:
            assert re.search(rf"{line[-1]} \}}.* expected .$", line), line


def test_pages_are_run() -> None:
    assert {"README.md", "docs/quickstart.md", "docs/gates.md", *CALLS} <= set(PAGES)
    for page, where in ELSEWHERE.items():
        assert code_blocks(ROOT / page, "python"), page
        assert not where.endswith(".py") or (ROOT / where).exists()


def test_readme_is_short_and_counts_right() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 900
    assert f"[{len(FAMILIES)} families]" in text and f"| {len(FAMILIES)} families |" in text
    others = {20: "Twenty"}[len(METHODS) - 1]
    assert f"{others} other methods" in text and f"gates and {len(METHODS) - 1} methods" in text
    assert f"{others.lower()} other methods" in (ROOT / "docs/index.md").read_text()
    table = (ROOT / "docs/which_method.md").read_text().partition("## Prompts")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.M)) == sorted(METHODS)
    for extra in re.findall(r"seergate\[(\w+)\]", text):
        assert extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    headings = {heading.lower().replace(" ", "-") for heading in re.findall(r"^## (.+)$", text, re.M)}
    assert set(re.findall(r"\]\(#([\w-]+)\)", text)) == headings - {"try-it"}
