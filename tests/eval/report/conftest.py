import pytest

from tests.support.made_reports import write_run


@pytest.fixture
def runs(tmp_path):
    write_run(tmp_path, "dense", None, lambda i: i < 18)
    write_run(tmp_path, "gate", 32, lambda i: i < 12, recall=[0.5, 0.7])
    write_run(tmp_path, "gate", 64, lambda i: i < 18, recall=[0.8, 0.9])
    write_run(tmp_path, "quest", 32, lambda i: i < 2, recall=[0.3, 0.4])
    write_run(tmp_path, "quest", 64, lambda i: i < 9, recall=[0.6, 0.7])
    return tmp_path
