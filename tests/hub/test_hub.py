"""Push and pull with the real client: nothing of it is replaced, only its address is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import seergate
from seergate import GateBank, GateConfig, SeergateError
from tests.hub.server import File, Hub
from tests.models import prompt, tiny_model

REPO = "org/gates"
FILES = {"README.md", "config.json", "gate_config.json", "gate_model.safetensors"}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that the client of this process talks to, with an empty cache and no token of its own."""
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    with Hub() as standing_in:
        monkeypatch.setattr(constants, "ENDPOINT", standing_in.url)
        template = standing_in.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield standing_in


@pytest.fixture
def bank(tmp_path):
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path / "base")
    bank = GateBank.for_model(type(model).from_pretrained(tmp_path / "base"), GateConfig(8, 16))
    bank.training_record = {"config": {"data": "open-r1/OpenR1-Math-220k", "steps": 3}, "kl_held_out_best": 0.5}
    return bank


def same(a: GateBank, b: GateBank) -> bool:
    return a.config == b.config and all(
        name == other and torch.equal(x, y)
        for (name, x), (other, y) in zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    )


def card(hub: Hub, repo: str = REPO, revision: str = "main") -> str:
    return hub.repos[repo].tree(revision)["README.md"].data.decode()


def metadata(text: str) -> dict:
    return yaml.safe_load(text.split("---")[1])


def test_push_and_pull(hub, bank, tmp_path):
    address = bank.push_to_hub(REPO, token="writer", commit_message="First", commit_description="of many")
    repo = hub.repos[REPO]
    assert address == f"{hub.url}/{REPO}/commit/{repo.refs['main']}"
    assert {*repo.tree()} == FILES | {".gitattributes"}
    assert repo.tree()["gate_model.safetensors"].lfs and not repo.tree()["gate_config.json"].lfs
    assert repo.log[-1]["summary"] == "First" and repo.log[-1]["description"] == "of many"
    assert not repo.private and len(repo.log) == 2, "one commit"

    again = GateBank.from_pretrained(REPO)
    assert same(again, bank) and again.geometry == bank.geometry
    downloads = len(hub.seen("GET", "/lfs/"))
    GateBank.from_pretrained(REPO)
    assert len(hub.seen("GET", "/lfs/")) == downloads == 1, "what is there is not downloaded again"
    GateBank.from_pretrained(REPO, force_download=True)
    assert len(hub.seen("GET", "/lfs/")) == 2
    elsewhere = tmp_path / "elsewhere"
    GateBank.from_pretrained(REPO, cache_dir=elsewhere)
    assert (elsewhere / "models--org--gates").is_dir()

    facts = metadata(card(hub))
    assert facts["library_name"] == "seergate" and facts["pipeline_tag"] == "text-generation"
    assert facts["datasets"] == ["open-r1/OpenR1-Math-220k"] and "seergate" in facts["tags"]
    assert facts["model-index"][0]["results"][0]["metrics"][0] == {
        "type": "kl_divergence",
        "value": 0.5,
        "name": "KL from the model's attention (nats per row)",
    }


def test_pull_by_revision(hub, bank):
    bank.push_to_hub(REPO, token="writer")
    first = hub.repos[REPO].refs["main"]
    other = GateBank(bank.config, bank.geometry)
    other.push_to_hub(REPO, token="writer")
    other.half().push_to_hub(REPO, token="writer", revision="half")
    assert same(GateBank.from_pretrained(REPO, revision=first), bank)
    assert not same(GateBank.from_pretrained(REPO), bank)
    assert GateBank.from_pretrained(REPO, revision="half").gate(0).k_proj.weight.dtype == torch.float16
    assert (
        GateBank.from_pretrained(REPO, revision="main", dtype=torch.float64).gate(0).k_proj.weight.dtype
        == torch.float64
    )
    with pytest.raises(SeergateError, match="it has no such revision"):
        GateBank.from_pretrained(REPO, revision="nowhere")


def test_the_same_gates_twice_make_no_second_commit(hub, bank):
    first = bank.push_to_hub(REPO, token="writer")
    assert bank.push_to_hub(REPO, token="writer") == first
    assert len(hub.repos[REPO].log) == 2


def test_shards_come_and_go(hub, bank):
    bank.push_to_hub(REPO, token="writer", max_shard_size=4000)
    names = {*hub.repos[REPO].tree()}
    assert "gate_model.safetensors.index.json" in names and "gate_model.safetensors" not in names
    assert sum(name.endswith(".safetensors") for name in names) > 2
    assert same(GateBank.from_pretrained(REPO), bank)
    bank.push_to_hub(REPO, token="writer")
    assert {*hub.repos[REPO].tree()} == FILES | {".gitattributes"}, "the shards are gone, in the same commit"
    assert same(GateBank.from_pretrained(REPO), bank)


def test_subfolder(hub, bank):
    bank.push_to_hub(REPO, token="writer", subfolder="block8/v1")
    assert {f"block8/v1/{name}" for name in FILES} <= {*hub.repos[REPO].tree()}
    assert same(GateBank.from_pretrained(REPO, subfolder="block8/v1"), bank)
    with pytest.raises(SeergateError, match=r"holds no gate_config\.json"):
        GateBank.from_pretrained(REPO)
    for outside in ("../other", "a/../../b", "/etc"):
        with pytest.raises(SeergateError, match="it must be a path inside"):
            GateBank.from_pretrained(REPO, subfolder=outside)


def test_private_repositories(hub, bank):
    bank.push_to_hub(REPO, token="writer", private=True)
    assert hub.repos[REPO].private
    assert same(GateBank.from_pretrained(REPO, token="writer"), bank)
    for token in (None, False, "reader"):
        with pytest.raises(SeergateError, match="no such repository, or it is private") as caught:
            GateBank.from_pretrained(REPO, token=token, force_download=True, cache_dir="nowhere")
        assert "\n" not in str(caught.value)
    with pytest.raises(SeergateError, match="not valid"):
        GateBank.from_pretrained(REPO, token="forged", cache_dir="nowhere")


def test_local_files_only(hub, bank):
    bank.push_to_hub(REPO, token="writer")
    with pytest.raises(SeergateError, match="could not be read from the Hub"):
        GateBank.from_pretrained(REPO, local_files_only=True)
    GateBank.from_pretrained(REPO)
    asked = len(hub.requests)
    assert same(GateBank.from_pretrained(REPO, local_files_only=True), bank)
    assert len(hub.requests) == asked


def test_pull_request(hub, bank):
    bank.push_to_hub(REPO, token="writer")
    other = GateBank(bank.config, bank.geometry)
    main = hub.repos[REPO].refs["main"]
    address = other.push_to_hub(REPO, token="reader", create_pr=True, commit_message="Better gates")
    assert address == f"{hub.url}/{REPO}/discussions/1"
    assert hub.repos[REPO].refs["main"] == main
    assert same(GateBank.from_pretrained(REPO, revision="refs/pr/1"), other)
    with pytest.raises(SeergateError, match="a pull request goes to main"):
        other.push_to_hub(REPO, token="reader", create_pr=True, revision="dev")


def test_what_an_owner_wrote_on_the_card_stays(hub, bank):
    bank.push_to_hub(REPO, token="writer")
    edited = card(hub).replace("library_name: seergate", "library_name: seergate\nlanguage: en\nlicense: mit")
    edited = (
        edited.replace("<!-- seergate: what", "# My gates\n\nI like them.\n\n<!-- seergate: what") + "\n## Thanks\n"
    )
    repo = hub.repos[REPO]
    repo.commit("main", {**repo.tree(), "README.md": File(edited.encode()), "notes.txt": File(b"mine")})
    bank.training_record = {**bank.training_record, "kl_held_out_best": 0.25}
    bank.push_to_hub(REPO, token="writer")
    text = card(hub)
    assert "I like them." in text and text.rstrip().endswith("## Thanks") and "notes.txt" in repo.tree()
    assert metadata(text)["language"] == "en" and metadata(text)["license"] == "mit"
    assert "0.25" in text and "0.5 " not in text and text.count("# Attention gates for") == 1


def test_a_new_branch_has_the_owners_text_too(hub, bank):
    hub.create({"name": "gates", "organization": "org"}, "writer")
    repo = hub.repos[REPO]
    repo.commit("main", repo.tree() | {"README.md": File(b"# Mine\n")})
    bank.push_to_hub(REPO, token="writer", revision="half")
    assert "# Mine" in card(hub, revision="half") and "## Use" in card(hub, revision="half")
    assert card(hub) == "# Mine\n"


def test_a_readme_and_a_model_that_were_there_before_stay(hub, bank):
    hub.create({"name": "gates", "organization": "org"}, "writer")
    repo = hub.repos[REPO]
    model = {"README.md": File(b"# A model\n\nText.\n"), "config.json": File(b'{"model_type": "qwen3"}')}
    repo.commit("main", repo.tree() | model)
    bank.push_to_hub(REPO, token="writer")
    assert "# A model\n\nText." in card(hub) and "## Use" in card(hub)
    assert repo.tree()["config.json"].data == b'{"model_type": "qwen3"}'
    assert same(GateBank.from_pretrained(REPO), bank)


def test_base_at_its_pinned_revision_and_licence(hub, bank, tmp_path):
    """The base lives on the Hub and moves on; the gates get the commit that they were made for."""
    from huggingface_hub import HfApi
    from transformers import AutoModelForCausalLM

    api = HfApi(token="writer")
    (tmp_path / "base" / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    api.create_repo("org/base")
    api.upload_folder(repo_id="org/base", folder_path=tmp_path / "base")
    pinned = hub.repos["org/base"].refs["main"]
    base = AutoModelForCausalLM.from_pretrained("org/base")
    gates = GateBank.for_model(base, GateConfig(8, 16))
    assert (gates.geometry.base_model, gates.geometry.base_revision) == ("org/base", pinned)
    gates.push_to_hub(REPO, token="writer")
    facts = metadata(card(hub))
    assert (facts["base_model"], facts["base_model_relation"], facts["license"]) == (
        "org/base",
        "adapter",
        "apache-2.0",
    )
    assert pinned in card(hub)

    tiny_model("qwen3", seed=1).save_pretrained(tmp_path / "changed")
    api.upload_folder(repo_id="org/base", folder_path=tmp_path / "changed")
    model = seergate.load(REPO, token_budget=16)
    expected = tiny_model("qwen3")
    with seergate.attached(expected, gates, token_budget=16):
        tokens = expected.generate(input_ids=prompt(60), max_new_tokens=12)
    assert torch.equal(model.generate(input_ids=prompt(60), max_new_tokens=12), tokens)
    newest = seergate.load(REPO, token_budget=16, base_model=str(tmp_path / "changed"))
    assert not torch.equal(newest.get_input_embeddings().weight, model.get_input_embeddings().weight)

    code = re.search(r"```python\n(.*?)```", card(hub), re.S)[1]
    assert f'seergate.load("{REPO}"' in code
    exec(compile(code, "card", "exec"), {})


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("POST", "/api/repos/create", 500, "the Hub is not well"),
        ("POST", "/api/repos/create", 401, "token is needed"),
        ("POST", "/commit/", 409, "somebody else has just changed"),
        ("POST", "/commit/", 412, "somebody else has just changed"),
        ("POST", "/commit/", 403, "this token may not do that"),
        ("POST", "/commit/", 429, "too many requests"),
        ("POST", "/commit/", 404, "404"),
        ("GET", "/tree/", 401, "token is needed"),
    ],
)
def test_push_refused(hub, bank, method, path, status, message):
    hub.fail(method, path, status, times=99)
    with pytest.raises(SeergateError, match=message) as caught:
        bank.push_to_hub(REPO, token="writer")
    assert str(caught.value).startswith(f"the adapter could not be pushed to {REPO}") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((REPO, "forged"), "not valid"),
        ((REPO, False), "token is needed"),
        ((REPO, "reader"), "may not do that|no such repository"),
        (("org/", "writer"), "it must have the form org/name"),
        (("org/gates/more", "writer"), "it must have the form org/name"),
        (("org/ga tes", "writer"), "it must have the form org/name"),
        (("org/-gates--", "writer"), "could not be"),
    ],
)
def test_push_by_the_wrong_person_or_to_the_wrong_place(hub, bank, arguments, message):
    repo, token = arguments
    with pytest.raises(SeergateError, match=message):
        bank.push_to_hub(repo, token=token)
    assert not hub.repos


def test_hub_that_is_not_there(hub, bank, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SeergateError, match="could not be pushed to org/gates: .*Connection refused"):
        bank.push_to_hub(REPO, token="writer")
    with pytest.raises(SeergateError, match="could not be read from the Hub"):
        GateBank.from_pretrained(REPO)


@pytest.mark.parametrize("status", [401, 403, 404, 500, 503])
def test_pull_refused(hub, bank, status):
    bank.push_to_hub(REPO, token="writer")
    hub.fail("GET", "/api/models/", status, times=99)
    with pytest.raises(SeergateError, match="could not be read from the Hub"):
        GateBank.from_pretrained(REPO)


def test_a_failed_push_leaves_the_old_adapter(hub, bank):
    bank.push_to_hub(REPO, token="writer")
    hub.fail("POST", "/commit/", 500, times=1)
    with pytest.raises(SeergateError):
        GateBank(bank.config, bank.geometry).push_to_hub(REPO, token="writer")
    assert same(GateBank.from_pretrained(REPO), bank)


def test_an_upload_that_is_refused_once_is_tried_again(hub, bank):
    hub.fail("PUT", "/lfs/", 503, times=1)
    bank.push_to_hub(REPO, token="writer")
    assert len(hub.seen("PUT", "/lfs/")) == 2 and same(GateBank.from_pretrained(REPO), bank)


def test_a_dropped_connection_is_resumed(hub, bank, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # what it writes at once
    bank.push_to_hub(REPO, token="writer")
    hub.cut("GET", "/lfs/", after=5000, times=1)
    assert same(GateBank.from_pretrained(REPO), bank)
    ranges = [headers.get("Range") for headers in hub.seen("GET", "/lfs/")]
    assert ranges[0] is None and re.fullmatch(r"bytes=[1-9]\d*-", ranges[1])


def test_a_download_that_was_killed_is_made_up_for_later(hub, bank, tmp_path):
    """A client that dies in the middle of a file leaves nothing that could be taken for an adapter."""
    bank.push_to_hub(REPO, token="writer", max_shard_size=4000)
    shards = sum(name.endswith(".safetensors") for name in hub.repos[REPO].tree())
    last = hub.repos[REPO].tree()[f"gate_model-{shards:05}-of-{shards:05}.safetensors"].sha256
    hub.cut("GET", f"/lfs/{last}", after=100)
    code = (
        "import os, seergate, huggingface_hub.file_download as download\n"
        "download.time.sleep = lambda seconds: os._exit(9)  # where it would wait before its next attempt\n"
        f"seergate.GateBank.from_pretrained({REPO!r})\n"
    )
    assert run_python(code, hub, tmp_path / "cache").returncode == 9
    with pytest.raises(SeergateError):
        GateBank.from_pretrained(REPO, local_files_only=True)
    assert same(GateBank.from_pretrained(REPO), bank)
    assert len(hub.seen("GET", f"/lfs/{last}")) == 2
    assert same(GateBank.from_pretrained(REPO, local_files_only=True), bank)


def test_a_damaged_file_on_the_hub_is_refused(hub, bank):
    bank.push_to_hub(REPO, token="writer")
    repo = hub.repos[REPO]
    data = bytearray(repo.tree()["gate_model.safetensors"].data)
    data[-3] ^= 4
    damaged = File(bytes(data), lfs=True)
    hub.lfs[damaged.sha256] = damaged.data
    repo.commit("main", {**repo.tree(), "gate_model.safetensors": damaged})
    with pytest.raises(SeergateError, match="SHA-256"):
        GateBank.from_pretrained(REPO)


def test_other_kinds_of_repository(hub, bank):
    hub.create({"name": "gates", "organization": "org"}, "writer")
    repo = hub.repos[REPO]
    for files, message in (
        ({}, "holds no gate_config"),
        ({"config.json": b'{"model_type": "qwen3"}'}, "looks like a model"),
        ({"config.json": b'{"seerattn_use_rope": true}'}, "seergate import-legacy"),
    ):
        repo.commit("main", {path: File(data) for path, data in files.items()})
        with pytest.raises(SeergateError, match=message):
            GateBank.from_pretrained(REPO)


def run_python(code: str, hub: Hub, cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Another process whose client talks to this Hub."""
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_OFFLINE")}
    environment |= {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": "writer",
    }
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.slow
def test_commands(hub, bank, tmp_path):
    """push, info and export from the shell."""
    bank.save_pretrained(tmp_path / "gates")
    own = tmp_path / "gates" / "README.md"
    own.write_text(own.read_text() + "\nWritten before it was pushed.\n")
    main = "import sys; from seergate.cli.main import main; sys.exit(main())"

    def seergate_command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_python(main, hub, tmp_path / "cache", *arguments)

    done = seergate_command("push", str(tmp_path / "gates"), REPO, "--private", "--message", "From the shell")
    assert done.returncode == 0 and f"{hub.url}/{REPO}/commit/" in done.stdout, done.stderr
    assert "lets others find it" in done.stdout
    assert "Written before it was pushed." in card(hub) and f'seergate.load("{REPO}"' in card(hub)
    assert hub.repos[REPO].private and hub.repos[REPO].log[-1]["summary"] == "From the shell"
    done = seergate_command("info", REPO, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["gates"]["block size"] == 8, done.stderr
    done = seergate_command("export", REPO, str(tmp_path / "half"), "--dtype", "float16", "--layers", "1")
    assert done.returncode == 0, done.stderr
    exported = GateBank.from_pretrained(tmp_path / "half")
    assert exported.geometry.layers == (1,) and exported.gate(1).k_proj.weight.dtype == torch.float16
    done = seergate_command("push", str(tmp_path / "gates"), "elsewhere/gates")
    assert done.returncode == 2 and done.stderr.startswith("error: the adapter could not be pushed")
    assert done.stderr.count("\n") == 1
