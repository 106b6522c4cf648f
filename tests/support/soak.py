"""Runs stress tests and long runs, and writes down when, where and how they ended: `make soak`.

The record, benchmarks/results/soak.json, says of each test its outcome, seconds and run; of each run date, commit,
machine and versions. It is written as tests end. `make soak` begins a new one; `python -m tests.support.soak -k NAME`
runs a part again and replaces its lines.
"""

import datetime
import json
import sys

import pytest
import torch

from benchmarks.common import RESULTS, provenance

RECORD = RESULTS / "soak.json"


class Recorder:
    """A pytest plugin that keeps the record up to date."""

    def __init__(self) -> None:
        old_record = json.loads(RECORD.read_text()) if RECORD.exists() else {"runs": {}, "tests": {}}
        self.runs, self.tests = old_record["runs"], old_record["tests"]
        machine = provenance(torch.device("cpu"))
        self.run = f"{datetime.date.today()} {machine.pop('commit')}"
        self.runs[self.run] = machine

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of one test has ended."""
        if report.when == "call" or report.outcome != "passed":
            line = {"outcome": report.outcome, "seconds": round(report.duration, 1), "run": self.run}
            self.tests[report.nodeid] = line
            used = {line["run"] for line in self.tests.values()}
            record = {"runs": {run: facts for run, facts in self.runs.items() if run in used}, "tests": self.tests}
            RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(pytest.main(["-m", "soak", *sys.argv[1:]], plugins=[Recorder()]))
