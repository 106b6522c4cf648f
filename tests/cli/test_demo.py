"""The demo as a user runs it: one command, from gates to a report."""

import json
import re

from seergate.cli import demo
from tests.support.running import output_of


def test_the_demo_distils_evaluates_and_reports(tmp_path):
    """Far too small to show anything but that every step works and what is promised is there."""
    out = tmp_path / "demo"
    output = output_of("demo", "--max-steps", "2", "--problems", "1", "--variables", "4", "--out", str(out))
    lines = output.splitlines()
    assert re.fullmatch(r"the demo took \d+ seconds", lines[-1])
    assert lines[-2] == f"report: {out / 'report.md'}  (the same with pictures inside: {out / 'report.html'})"
    shows = lines.index("What the report shows:")
    findings = lines[shows + 1 : -3]
    assert findings and all(line.startswith("- ") for line in findings)
    report = (out / "report.md").read_text()
    assert all(line.removeprefix("- ") in report for line in findings)
    assert "## Results" in (out / "gates" / "README.md").read_text()
    settings = {"dense", *(f"{name}-{budget}" for name in demo.METHODS if name != "dense" for budget in demo.BUDGETS)}
    assert {path.parent.name for path in (out / "eval").glob("*/metrics.json")} == settings
    for name in settings:
        assert json.loads((out / "eval" / name / "metrics.json").read_text())["n_problems"] == 1
        assert f"{name}: 1/1 answers" in output
    assert f"[1/{len(settings)}] dense: 1/1 answers" in output
    pictures = sorted(out.glob("*.png"))
    assert {"accuracy.png", "length.png"} <= {path.name for path in pictures}
    for path in pictures:
        assert path.stat().st_size > 10_000 and f"({path.name})" in report
    assert (out / "report.html").read_text().count("data:image/png;base64,") == len(pictures)
