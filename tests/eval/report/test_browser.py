"""The HTML report in a real browser. Runs where Chromium is installed; it is not among the project's requirements."""

import shutil
import subprocess
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from seergate.eval.report import write_report
from tests.support.made_reports import write_run

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((path for path in map(shutil.which, NAMES) if path), None)

HEADLESS = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu"]

pytestmark = needs_a_browser = pytest.mark.skipif(CHROMIUM is None, reason=f"needs one of {', '.join(NAMES)}")


def opened(page: Path, profile: Path) -> tuple[list[str], Path]:
    """What a page writes to the console, and a picture of it."""
    picture = profile.with_suffix(".png")
    command = [*HEADLESS, f"--user-data-dir={profile}", "--enable-logging=stderr"]
    command += ["--window-size=1100,2400", f"--screenshot={picture}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line], picture


@contextmanager
def serving(page=b"", posted=None):
    """A host on this machine that has one page: its address, and the paths that were asked of it."""
    requested_paths = list[str]()

    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            requested_paths.append(self.path)
            self.send_response(200 if page and self.path == "/" else 404)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page if self.path == "/" else b"")

        def do_POST(self):
            posted(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requested_paths
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def host():
    with serving() as address_and_paths:
        yield address_and_paths


def test_the_report_opens_without_a_word_on_the_console(tmp_path):
    from PIL import Image

    bad = tmp_path / "bad.html"
    bad.write_text("<script>console.error('seen'); missing();</script>")
    messages, _ = opened(bad, tmp_path / "first")
    assert len(messages) == 2 and "seen" in messages[0], "what would be wrong shows"

    write_run(tmp_path / "runs", "dense", None, lambda i: i < 18)
    write_run(tmp_path / "runs", "gate", 32, lambda i: i < 12, recall=[0.5, 0.7])
    page = write_report(tmp_path / "runs").html
    messages, picture = opened(page, tmp_path / "second")
    assert messages == []
    with Image.open(picture) as image:
        colours = image.convert("RGB").getcolors(maxcolors=10**7)
    assert len(colours) > 100, "text and plots are there"
    # the gate's colour, which only a plot has: its image was decoded
    assert any(count > 50 and colour == (0xD5, 0x5E, 0x00) for count, colour in colours)


def test_the_policy_holds_even_where_nothing_is_escaped(tmp_path, host):
    """It is seen in the browser's words: each forbidden thing is refused, and nothing is asked of the host."""
    address, requested_paths = host
    write_run(tmp_path / "runs", "dense", None, lambda i: True)
    page, bad = write_report(tmp_path / "runs").html.read_text(), tmp_path / "bad.html"
    image = f'<img src="{address}/i.png">'
    tags = f"<script>console.error('ran')</script><style>h1 {{ background: url({address}/s.png) }}</style>{image}"
    bad.write_text(page.replace("</body>", f'{tags}<iframe src="{address}/f.html"></iframe></body>'))
    messages, _ = opened(bad, tmp_path / "first")
    assert messages and all("Content Security Policy" in line for line in messages) and requested_paths == []
    assert all(any(kind in line for line in messages) for kind in ("script", "style", "img-src", "frame")), messages
    bad.write_text(page.replace("Content-Security-Policy", "none").replace("</body>", f"{image}</body>"))
    opened(bad, tmp_path / "second")
    assert requested_paths == ["/i.png"], "without the policy the host is asked"
