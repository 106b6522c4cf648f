"""The wheel and the source archive pass PyPI's checks, and the wheel runs in an empty environment."""

import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.test_house import ROOT

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


def run(*command: str | Path, cwd: Path) -> str:
    """The output of a command, which must not fail."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(cwd)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the wheel and the archive."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    return folder


def test_pypi_takes_it(built: Path) -> None:
    files = sorted(built.iterdir())
    assert [path.suffix for path in files] == [".whl", ".gz"] or [path.suffix for path in files] == [".gz", ".whl"]
    assert "PASSED" in run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=built)


def test_links_of_its_page_lead_into_the_repository(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("METADATA"))
    links = re.findall(r"(!?)\[[^]]*\]\(([^)\s]+)\)", metadata)
    assert len(links) > 20
    for picture, target in links:
        assert target.startswith(("https://", "#")), target
        if match := re.match(r"https://[\w.]+/seergate/seergate/(?:blob/)?main/([^#]+)", target):
            assert (ROOT / match[1]).exists(), target
            assert bool(picture) == ("raw.githubusercontent" in target), target
    assert "Project-URL: Homepage" in metadata


def test_the_demo_runs_in_an_empty_environment(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    run(programs / "pip", "install", "-q", "-c", ROOT / ".ci/constraints/torch.txt", f"{wheel}[eval]", cwd=tmp_path)
    run(programs / "seergate", "demo", cwd=tmp_path)
    (report,) = tmp_path.glob("runs/demo-*/report.html")
    assert "gate" in report.read_text()
    assert not list((tmp_path / "venv").rglob("deepspeed"))
    assert "rpc-table1" in run(programs / "seergate", "figure", "--help", cwd=tmp_path), "papers/ is in the wheel"
