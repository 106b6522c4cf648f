"""Where an adapter is pushed: one's own namespace, a branch, a subfolder. Its card says how to load it from there."""

from __future__ import annotations

import re

import pytest

import seergate
from seergate import GateBank, SeergateError
from seergate.cli.main import main
from tests.hub.test_hub import REPO, bank, card, hub, same

__all__ = ["bank", "hub"]


def example(text: str) -> str:
    return re.search(r"```python\n(.*?)```", text, re.S)[1]


def run(text: str) -> dict:
    """Run a card's example; what it defined."""
    names: dict = {}
    exec(compile(example(text), "card", "exec"), names)
    return names


def test_save_pretrained_pushes_to_the_directorys_name_in_ones_own_namespace(hub, bank, tmp_path, monkeypatch):
    bank.save_pretrained(tmp_path / "my-gates", push_to_hub=True, token="writer", private=True)
    assert [*hub.repos] == ["writer/my-gates"] and hub.repos["writer/my-gates"].private
    assert same(GateBank.from_pretrained(tmp_path / "my-gates"), bank)
    assert same(GateBank.from_pretrained("writer/my-gates", token="writer"), bank)
    assert 'seergate.load("writer/my-gates", token_budget=' in example(card(hub, "writer/my-gates"))
    commits = len(hub.repos["writer/my-gates"].log)
    bank.save_pretrained(tmp_path / "my-gates", push_to_hub=True, token="writer")
    assert len(hub.repos["writer/my-gates"].log) == commits, "the same card, so no second commit"

    monkeypatch.chdir(tmp_path / "my-gates")
    bank.half().save_pretrained(".", push_to_hub=True, token="writer")
    assert [*hub.repos] == ["writer/my-gates"]
    assert same(GateBank.from_pretrained("writer/my-gates", token="writer"), bank)


def test_save_pretrained_pushes_where_it_is_told_to(hub, bank, tmp_path):
    options = {"repo_id": REPO, "token": "writer", "subfolder": "v1", "max_shard_size": 4000}
    bank.save_pretrained(tmp_path / "my-gates", push_to_hub=True, **options)
    assert [*hub.repos] == [REPO]
    assert same(GateBank.from_pretrained(REPO, subfolder="v1"), bank)
    with pytest.raises(SeergateError, match="repo_id is 'my gates'; it must have the form org/name, or name"):
        bank.save_pretrained(tmp_path / "my gates", push_to_hub=True, token="writer")
    assert not (tmp_path / "my gates").exists(), "said before anything is written"
    with pytest.raises(SeergateError, match="the adapter could not be pushed to new-gates: .*token is needed"):
        bank.save_pretrained(tmp_path / "new-gates", push_to_hub=True, token=False)
    assert [*hub.repos] == [REPO]


def test_a_bare_name_from_the_shell(hub, bank, tmp_path, capsys):
    bank.save_pretrained(tmp_path / "gates")
    assert main(["push", str(tmp_path / "gates"), "mine", "--token", "writer"]) == 0
    assert f"pushed: {hub.url}/writer/mine/commit/" in capsys.readouterr().out
    assert 'seergate.load("writer/mine"' in example(card(hub, "writer/mine"))


@pytest.mark.parametrize(
    ("place", "arguments"),
    [
        ({}, ""),
        ({"revision": "main"}, ""),
        ({"revision": "half"}, ', revision="half"'),
        ({"subfolder": "block8/v1"}, ', subfolder="block8/v1"'),
        ({"revision": "half", "subfolder": "v1"}, ', revision="half", subfolder="v1"'),
    ],
)
def test_the_cards_example_loads_what_was_pushed(hub, bank, place, arguments):
    if place.get("revision") != "main" and place:  # what an example without the place would load
        GateBank(bank.config, bank.geometry).push_to_hub(REPO, token="writer")
    bank.push_to_hub(REPO, token="writer", **place)
    path = "/".join(filter(None, [place.get("subfolder"), "README.md"]))
    text = hub.repos[REPO].tree(place.get("revision", "main"))[path].data.decode()
    assert f'seergate.load("{REPO}"{arguments}, token_budget=4096)' in example(text)
    model = run(text)["model"]
    assert same(seergate.handle_of(model).method.bank, bank)


def test_the_example_for_gates_without_a_base_names_the_place_too(hub, bank):
    bank.geometry = bank.geometry.__class__(**{**vars(bank.geometry), "base_model": None})
    bank.push_to_hub(REPO, token="writer", revision="half", subfolder="v1")
    text = hub.repos[REPO].tree("half")["v1/README.md"].data.decode()
    assert same(run(text)["bank"], bank)
