"""The HTML report in a real browser. Runs where Chromium is installed; it is not among the project's requirements."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from seergate.eval.report import write_report
from tests.support.made_reports import write_run

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


@pytest.fixture
def host():
    """A host on this machine, its address and the paths that were asked of it."""
    asked = list[str]()

    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


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


def test_a_report_of_hostile_text_runs_and_fetches_nothing(tmp_path, host):
    address, asked = host
    hostile = f"![t]({address}/t.png) [click](javascript:alert(1)) <img src={address}/i.png onerror=console.error(1)>"
    hostile += f"<script>console.error(2)</script> [d](data.csv) <link rel=stylesheet href={address}/l.css>"
    directory = write_run(tmp_path / "runs", "dense", None, lambda i: True, model=hostile, completion=hostile)
    path = directory / "samples.jsonl"
    path.write_text(path.read_text().replace('"gold": "1"', f'"gold": {json.dumps(hostile)}'))
    page = write_report(tmp_path / "runs").html
    assert opened(page, tmp_path / "first")[0] == [] and asked == []
    assert not re.search(r'(href|src)="(?!data:|#)', page.read_text()) and "<script" not in page.read_text()


def test_the_policy_holds_even_where_nothing_is_escaped(tmp_path, host):
    """It is seen in the browser's words: each forbidden thing is refused, and nothing is asked of the host."""
    address, asked = host
    write_run(tmp_path / "runs", "dense", None, lambda i: True)
    page = write_report(tmp_path / "runs").html
    told = ["script", "style", f'img src="{address}/i.png"', f'iframe src="{address}/f.html"']
    for number, tag in enumerate(told):
        content = {"script": "console.error('ran')", "style": f"h1 {{ background: url({address}/s.png) }}"}.get(
            tag, ""
        )
        copy = tmp_path / f"{number}.html"
        copy.write_text(page.read_text().replace("</body>", f"<{tag}>{content}</{tag.split()[0]}></body>"))
        said, _ = opened(copy, tmp_path / f"profile-{number}")
        assert said and all("Content Security Policy" in line for line in said), tag
    assert asked == []
    bare = page.read_text().replace("Content-Security-Policy", "none").replace("</body>", f"<{told[2]}></body>")
    (tmp_path / "bare.html").write_text(bare)
    opened(tmp_path / "bare.html", tmp_path / "bare")
    assert asked == ["/i.png"], "without the policy the host is asked"
