"""The HTML report in a real browser. Runs where Chromium is installed; it is not among the project's requirements."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from seergate.report import write_report
from tests.report.made import write_run

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((path for path in map(shutil.which, NAMES) if path), None)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=f"needs a browser: one of {', '.join(NAMES)}")


def opened(page: Path, profile: Path) -> tuple[list[str], Path]:
    """What a page writes to the console, and a picture of it."""
    picture = profile.with_suffix(".png")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    command += ["--enable-logging=stderr", "--window-size=1100,2400", f"--screenshot={picture}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line], picture


def test_the_report_opens_without_a_word_on_the_console(tmp_path):
    from PIL import Image

    bad = tmp_path / "bad.html"
    bad.write_text("<script>console.error('seen'); missing();</script>")
    said, _ = opened(bad, tmp_path / "first")
    assert len(said) == 2 and "seen" in said[0], "what would be wrong shows"

    write_run(tmp_path / "runs", "dense", None, lambda i: i < 18)
    write_run(tmp_path / "runs", "gate", 32, lambda i: i < 12, recall=[0.5, 0.7])
    page = write_report(tmp_path / "runs").html
    said, picture = opened(page, tmp_path / "second")
    assert said == []
    with Image.open(picture) as image:
        colours = image.convert("RGB").getcolors(maxcolors=10**7)
    assert len(colours) > 100, "text and plots are there"
    # the gate's colour, which only a plot has: its image was decoded
    assert any(count > 50 and colour == (0xD5, 0x5E, 0x00) for count, colour in colours)
