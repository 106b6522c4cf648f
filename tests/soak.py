"""Runs storms and long runs, and writes down when, where and how they ended: `make soak`.

The record, benchmarks/results/soak.json, has one line per test: outcome and seconds. It is written as tests end, so a
storm that is stopped leaves what it had.
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
        self.about = {"date": datetime.date.today().isoformat(), "machine": provenance(torch.device("cpu"))}
        self.tests: dict[str, dict[str, str | float]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of one test has ended."""
        if report.when == "call" or report.outcome != "passed":
            self.tests[report.nodeid] = {"outcome": report.outcome, "seconds": round(report.duration, 1)}
            lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(self.tests[name])}" for name in sorted(self.tests))
            RECORD.write_text(json.dumps(self.about, indent=1)[:-2] + ',\n "tests": {\n' + lines + "\n }\n}\n")


if __name__ == "__main__":
    sys.exit(pytest.main(["-m", "soak", *sys.argv[1:]], plugins=[Recorder()]))
