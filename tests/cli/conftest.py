import shutil

import pytest

from tests.support import evaluation as support


@pytest.fixture(scope="package")
def saved(tmp_path_factory):
    return str(support.save(tmp_path_factory.mktemp("model")))


@pytest.fixture
def weightless(saved, tmp_path):
    """A copy of the model that cannot be loaded: what is told of it is told before."""
    return shutil.copytree(saved, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
