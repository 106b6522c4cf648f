"""CONTRIBUTING draws the walk of a decode step. A real one, of the tiny reasoner with its gates, goes that way."""

import re
import sys
from pathlib import Path

import torch
from transformers import DynamicCache

import seergate
from seergate import GateBank
from seergate.models.loading import load_base
from seergate.paths import shipped
from tests.support.models import prompt

ROOT = Path(seergate.__file__).parent
CONTRIBUTING = (ROOT.parent / "CONTRIBUTING.md").read_text()
DRAWING = CONTRIBUTING.partition("## The walk of a decode step")[2].partition("\n## ")[0]


def drawn() -> list[tuple[str, str]]:
    return re.findall(r"^  (\S+\.py) +(\S+)", DRAWING.split("```")[1], re.MULTILINE)


def walked() -> list[tuple[str, str]]:
    """File and function of each call into seergate, in order."""
    model = load_base("checkpoints/tiny-reasoner")
    bank, calls = GateBank.from_pretrained(shipped("checkpoints/tiny-reasoner/gates")), []

    def note(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            calls.append((path.relative_to(ROOT).as_posix(), frame.f_code.co_qualname))

    with seergate.attached(model, bank, token_budget=64), torch.no_grad():
        cache = DynamicCache()
        model(prompt(300), past_key_values=cache)
        model(prompt(1), past_key_values=cache)
        sys.setprofile(note)
        try:
            model(prompt(1), past_key_values=cache)
        finally:
            sys.setprofile(None)
    return calls


def test_a_decode_step_goes_the_way_that_is_drawn():
    calls, way = walked(), drawn()
    assert len(way) > 12
    remaining = iter(calls)
    for station in way:
        assert station in remaining, f"a step does not come to {station}, or not in this place"
    files = {file for file, _ in calls}
    # ops check their arguments by these two
    arithmetic = {file for file in files if file.startswith(("ops/", "gates/")) or file in ("checks.py", "config.py")}
    beside = set(re.findall(r"`(\S+\.py)` \(", DRAWING.split("```")[2].partition("The computation is in")[0]))
    assert files - arithmetic == {file for file, _ in way} | beside
    assert len({file for file, _ in way}) <= 6
