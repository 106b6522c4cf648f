"""The documentation: its contents, generated tables and figures, and in `make soak` the site's strict build."""

import json
import re
import runpy
import subprocess
import sys
import zlib
from pathlib import Path
from types import ModuleType

import pytest

import seergate
from seergate.eval import report
from tests.support.running import ROOT

DOCS = ROOT / "docs"


def test_every_page_is_in_the_contents() -> None:
    pages = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])
    assert len(pages) == len(set(pages))
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if "examples" not in path.parts}
    assert set(pages) == written
    index = (DOCS / "index.md").read_text()
    assert not {page for page in pages if not page.startswith(("index", "api/")) and f"({page})" not in index}


def test_the_table_of_options_is_true() -> None:
    options = runpy.run_path(str(DOCS / "options.py"))
    assert (DOCS / "options.md").read_text() == options["page"](), "run: python docs/options.py"


def test_the_figure_of_the_readme_draws_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    trade_off = runpy.run_path(str(ROOT / "benchmarks/trade_off.py"))
    left, right = trade_off["draw"](ROOT / "benchmarks/results").axes
    (gate,) = (line for line in left.containers if line.get_label() == "gate")
    rows = json.loads((ROOT / "benchmarks/results/board.json").read_text())["rows"]
    texts = (row for row in rows if (row["model"], row["part"]) == ("qwen2.5-coder-0.5b", "texts"))
    kl = {row["budget"]: row["kl"] for row in texts if row["method"] == "gate"}
    assert list(gate.lines[0].get_ydata()) == [kl[budget] for budget in sorted(kl)] and {256, 512, 1024} <= kl.keys()
    assert len(right.lines) == 4
    for line in right.lines:
        assert list(line.get_xdata()) == [1, 4, 16] and min(line.get_ydata()) > 0


def public_names() -> dict[str, str]:
    """Public names, which the reference must describe, and where each is defined."""
    modules = (seergate, seergate.methods, seergate.ops, seergate.distill, seergate.eval, report)
    names = [(module, name) for module in modules for name in module.__all__]
    objects = {f"{module.__name__}.{name}": getattr(module, name) for module, name in names}
    homes = {name: f"{getattr(value, '__module__', '')}.{name.split('.')[-1]}" for name, value in objects.items()}
    return {name: home for name, home in homes.items() if not isinstance(objects[name], ModuleType)}


@pytest.mark.soak
def test_the_site_builds_and_describes_every_public_name(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    inventory = (tmp_path / "objects.inv").read_bytes().split(b"\n", 4)[4]
    described = {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines()}
    missing = {name for name, home in public_names().items() if not {name, home} & described}
    assert not missing
    for page in tmp_path.glob("*/index.html"):
        text = page.read_text()
        assert "arithmatex" not in text and not re.search(r"<script[^>]* src=.https?:", text), page
    assert (tmp_path / "concepts/index.html").read_text().count('display="block"') == 5
