"""Reports on runs of `seergate.eval`: tables, plots and sentences."""

from __future__ import annotations

from seergate.eval.report.explorer import write_explorer
from seergate.eval.report.load import Sweep, load_sweeps
from seergate.eval.report.write import write_report

__all__ = ["Sweep", "load_sweeps", "write_explorer", "write_report"]
