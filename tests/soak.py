"""Runs storms and long runs, and writes down when, where and how they ended: `make soak`.

The record, benchmarks/results/soak.json, has one line per test: outcome, seconds, commit, date and processor. It is
written as tests end. `make soak` begins a new one; `python -m tests.soak -k NAME` runs a part again and replaces its
lines.
"""

from __future__ import annotations

import datetime
import json
import sys

import pytest
import torch

from tests.running import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from common import RESULTS, provenance

RECORD = RESULTS / "soak.json"


class Recorder:
    """A pytest plugin that keeps the record up to date."""

    def __init__(self) -> None:
        self.machine = provenance(torch.device("cpu"))
        self.when = {"commit": self.machine.pop("commit"), "date": datetime.date.today().isoformat()}
        self.when["device"] = self.machine.pop("device")  # a part may be run again on another one
        self.tests = json.loads(RECORD.read_text())["tests"] if RECORD.exists() else {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of one test has ended."""
        if report.when == "call" or report.outcome != "passed":
            self.tests[report.nodeid] = {"outcome": report.outcome, "seconds": round(report.duration, 1), **self.when}
            lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(self.tests[name])}" for name in sorted(self.tests))
            RECORD.write_text(f'{{\n "machine": {json.dumps(self.machine)},\n "tests": {{\n{lines}\n }}\n}}\n')


if __name__ == "__main__":
    sys.exit(pytest.main(["-m", "soak", *sys.argv[1:]], plugins=[Recorder()]))
