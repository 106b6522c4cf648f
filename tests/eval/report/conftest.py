import pytest

from seergate.eval.report import write_report
from tests.support.made_reports import write_run


def write_runs(directory):
    write_run(directory, "dense", None, lambda i: i < 18)
    write_run(directory, "gate", 32, lambda i: i < 12, recall=[0.5, 0.7])
    write_run(directory, "gate", 64, lambda i: i < 18, recall=[0.8, 0.9])
    write_run(directory, "quest", 32, lambda i: i < 2, recall=[0.3, 0.4])
    write_run(directory, "quest", 64, lambda i: i < 9, recall=[0.6, 0.7])
    return directory


@pytest.fixture
def runs(tmp_path):
    return write_runs(tmp_path)


@pytest.fixture(scope="package")
def report(tmp_path_factory):
    """The report of these runs, one of which has metrics that are not its samples'."""
    directory = write_runs(tmp_path_factory.mktemp("runs"))
    (directory / "gate-32" / "metrics.json").write_text('{"accuracy": 0.99}')
    return write_report(directory)
