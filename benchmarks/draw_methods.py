"""The figures of docs/methods.md: `methods.json` of `benchmarks/results`, drawn as a report draws its runs.

python benchmarks/draw_methods.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from common import RESULTS

from seergate.report.load import Setting, Sweep
from seergate.report.plots import accuracy_plot, bytes_plot

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "images"


def setting_of(row: dict[str, Any], options: dict[str, Any]) -> Setting:
    """A row of the results. There is one answer to each problem, so how many are right is all there is to know."""
    problems, name = row["n_problems"], row["method"].split(",")[0]
    method = {"name": name, "token_budget": row["budget"], "nominal": row["nominal"]}
    right = round(row["accuracy"] * problems)
    return Setting(
        directory=Path(f"{row['method']} at {row['nominal']}"),
        config=options | {"model": {"path": "tiny-reasoner"}, "method": method},
        metrics=row | {"n_samples": problems},
        correct={str(i): [float(i < right)] for i in range(problems)},
        series=row["method"],
    )


def main() -> None:
    """Read, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=PICTURES, help="folder of the pictures")
    folder = parser.parse_args().output
    record = json.loads((RESULTS / "methods.json").read_text())
    found = Sweep([setting_of(row, record["options"]) for row in record["rows"]])
    for draw, name in ((accuracy_plot, "methods-accuracy"), (bytes_plot, "methods-bytes")):
        path = folder / f"{name}.png"
        draw(found, path)
        path.with_suffix(".svg").unlink()
        print(path)


if __name__ == "__main__":
    main()
