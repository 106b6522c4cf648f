"""The notebooks run from top to bottom, and are stored without outputs."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.test_house import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def cells(notebook: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == kind]


def run(notebook: Path) -> tuple[dict[str, Any], Any]:
    """Run the cells in order; returns their names and the value of the last expression."""
    names, shown = {"__name__": "__main__"}, None
    for cell in cells(notebook, "code"):
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, notebook.name, "exec"), names)
        if last is not None:
            shown = eval(compile(ast.Expression(last.value), notebook.name, "eval"), names)
    return names, shown


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_kept_as_source_only(notebook: Path) -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells(notebook, "code"))
    kinds = [cell["cell_type"] for cell in json.loads(notebook.read_text())["cells"]]
    assert "code code" not in " ".join(kinds), "a cell is explained before it"
    first = "".join(cells(notebook, "markdown")[0]["source"])
    assert f"github/seergate/seergate/blob/main/docs/notebooks/{notebook.name}" in first, "opens on Colab"


@pytest.mark.slow
def test_decode_and_look(capsys: pytest.CaptureFixture[str]) -> None:
    names, page = run(ROOT / "docs" / "notebooks" / "decode_and_look.ipynb")
    output = capsys.readouterr().out
    answers = {name: output.partition(f"\n{name}: ")[2].split("\n")[0] for name in ("dense", "gate")}
    assert [text.split()[-2] for text in answers.values()] == [names["problem"].answer] * 2
    assert names["stats"]["dense"]["density"] == 1 > 0.4 > names["stats"]["gate"]["density"]
    assert page._repr_html_().startswith("<iframe srcdoc=") and "&lt;script" in page._repr_html_()


@pytest.mark.slow
def test_train_gates(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    names, _ = run(ROOT / "docs" / "notebooks" / "train_gates.ipynb")
    before, after = names["before"], names["after"]
    assert sum(after) / len(after) > sum(before) / len(before) + 0.1
    assert names["losses"][-1] < names["losses"][0] / 2
    answer, _, right = capsys.readouterr().out.rpartition("right:")
    assert answer.split()[-2] == right.strip() == names["fresh"].answer
