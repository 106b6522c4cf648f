"""The page in a real browser: what a reader points at is what is shown."""

import json
import queue
import subprocess
from pathlib import Path

import pytest
import torch

from seergate.eval.report.explorer import write_explorer
from tests.decode.test_decode import BLOCK, gates
from tests.eval.report.test_browser import HEADLESS, needs_a_browser, opened, serving
from tests.eval.report.test_explorer import answered, page_of
from tests.support.evaluation import tokenizer
from tests.support.models import tiny_model

pytestmark = needs_a_browser

READER = """<script nonce="reader">
(async () => {
  const seen = {}, answer = document.querySelectorAll(".answer .token");
  const pause = time => new Promise(done => setTimeout(done, time));
  const state = () => ({
    token: document.querySelector("#token b").textContent, said: document.querySelector("#token").textContent,
    read: [...document.querySelectorAll(".block")].filter(b => b.style.background).map(b => +b.dataset.block),
    grid: [...document.querySelectorAll("#grid button")].map(b => b.textContent),
    listed: document.querySelectorAll("#list tr").length,
  });
  async function point(i) {
    answer[i].scrollIntoView({block: "center"});
    const box = [...answer[i].getClientRects()].at(-1);  // a line may end in it
    const there = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
    there.dispatchEvent(new MouseEvent("mouseover", {bubbles: true}));
    while (document.body.dataset.shown != answer[i].dataset.token) await pause(0);
  }
  const errors = seen.errors = [];
  addEventListener("error", event => errors.push(event.message));
  dispatchEvent(new Event("resize"));  // a window may be resized, and anything clicked, before a step is unpacked
  document.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"}));
  document.querySelector("#grid button").click();
  document.querySelector("#grid button").click();
  document.querySelector("#chart").click();
  await pause(500);
  seen.first = {shown: +document.body.dataset.shown, ...state()};
  await point(POINTED);
  seen.pointed = state();
  document.querySelectorAll("#grid button")[CELL].click();
  seen.cell = state();
  answer[POINTED].click();
  answer[1].dispatchEvent(new MouseEvent("mouseover", {bubbles: true}));
  await pause(100);
  seen.held = state();
  document.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"}));
  document.querySelector("#grid button").click();
  for (let i = 1; i < answer.length; i += Math.ceil(answer.length / 50)) await point(i);
  await point(0);
  seen.dense = state();
  await fetch("/seen", {method: "POST", body: JSON.stringify(seen)});
})();
</script>"""


def read_by(page: Path, profile: Path, pointed: int, cell: int) -> dict:
    """What a reader sees who points at a token of the answer, then chooses an entry of the grid."""
    reader = READER.replace("POINTED", str(pointed)).replace("CELL", str(cell))
    text = page.read_text().replace("</body>", reader + "</body>")
    for own, wider in (("script-src ", "script-src 'nonce-reader' "), ("img-src ", "connect-src 'self'; img-src ")):
        assert text.count(own) == 1
        text = text.replace(own, wider)  # the page's policy, and the reader
    seen = queue.Queue()
    with serving(text.encode(), posted=seen.put) as (address, _):
        browser = subprocess.Popen(
            [*HEADLESS, f"--user-data-dir={profile}", "--remote-debugging-port=0", "--window-size=1400,900", address],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            return json.loads(seen.get(timeout=120))
        finally:
            browser.terminate()
            browser.wait(30)


def written(folder: Path, prompt: int, new: int) -> Path:
    model = tiny_model("qwen3", vocab_size=len(tokenizer()))
    ids = torch.randint(6, len(tokenizer()), (1, prompt), generator=torch.Generator().manual_seed(1))
    answer = answered(model, folder / "trace", gates(model), {"input_ids": ids}, new, token_budget=4 * BLOCK)
    return write_explorer(folder / "trace", tokenizer(), answer[0].tolist(), folder / "page.html").path


def test_what_is_pointed_at_is_shown(tmp_path):
    page = written(tmp_path, 60, 40)
    data = page_of(page)
    seen = read_by(page, tmp_path / "reader", pointed=20, cell=5)  # after all, two heads, layer 0 and its first head

    assert seen["first"]["shown"] == 60 + 28, "it opens with a token shown"
    planes = data["steps"][80]
    assert seen["pointed"]["token"] == data["tokens"][80].strip()
    assert sorted(set(seen["pointed"]["read"])) == planes[0].any(0).nonzero()[0].tolist()
    shares = (planes[2] / 255.0) ** 2
    recall = (shares * planes[0]).sum(1) / shares.sum(1)
    digits = [float(text) for text in seen["pointed"]["grid"] if text.isdigit()]
    assert digits == pytest.approx((100 * recall).tolist(), abs=0.51)
    assert seen["pointed"]["listed"] == min(10, planes.shape[2] - 1) + 1
    assert sorted(set(seen["cell"]["read"])) == planes[0, 1].nonzero()[0].tolist(), "one layer and head"
    assert seen["held"]["token"] == seen["cell"]["token"], "a token that is held stays"
    assert "there is no step" in seen["dense"]["said"] and seen["dense"]["read"] == []

    assert seen["errors"] == []
    messages, picture = opened(page, tmp_path / "second")
    assert messages == [] and picture.stat().st_size > 20_000
