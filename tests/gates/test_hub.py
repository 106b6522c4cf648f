"""Push and pull with the real client: nothing of it is replaced, only its address is."""

from __future__ import annotations

import json
import re

import pytest
import torch
import yaml

import seergate
from seergate import GateBank, GateConfig, SeergateError
from seergate.cli.main import main
from seergate.distill import load_train_config
from seergate.distill.trainer import prepare_run
from seergate.hub import hub_call, offline
from seergate.models.loading import base_config, download_weights, load_base
from seergate.pretrained import load_tokenizer
from tests.distill.conftest import PLAIN, byte_tokenizer
from tests.gates.test_legacy import SMALL
from tests.support.hub_server import File, Hub
from tests.support.models import prompt, tiny_model

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
        monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)  # it remembers its endpoint
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
    bank.training_record = {"config": {"data": "open-r1/OpenR1-Math-220k", "max_steps": 3}, "kl_held_out_best": 0.5}
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
    generated = text[text.index("<!-- seergate: what") : text.index("## Thanks")]
    bank.push_to_hub(REPO, token="writer", card=generated)
    assert "I like them." in card(hub), "a card without own text does not replace one that has some"


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
    named = seergate.load(REPO, token_budget=16, base_model="org/base")
    assert torch.equal(named.get_input_embeddings().weight, model.get_input_embeddings().weight)
    newest = seergate.load(REPO, token_budget=16, base_model=str(tmp_path / "changed"))
    assert not torch.equal(newest.get_input_embeddings().weight, model.get_input_embeddings().weight)

    assert f'seergate.load("{REPO}"' in example(card(hub))
    run(card(hub))


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("POST", "/api/repos/create", 500, "Hub server error 500"),
        ("GET", "/tree/", 401, "token is needed"),
        ("POST", "/commit/", 412, "somebody else has just changed"),
        ("POST", "/commit/", 403, "this token may not do that"),
        ("POST", "/commit/", 404, "404"),
    ],
)
def test_push_refused(hub, bank, method, path, status, message):
    hub.fail(method, path, status, times=99)
    with pytest.raises(SeergateError, match=message) as caught:
        bank.push_to_hub(REPO, token="writer")
    assert str(caught.value).startswith(f"the gates could not be pushed to {REPO}") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((REPO, "forged"), "not valid"),
        ((REPO, False), "token is needed"),
        ((REPO, "reader"), "may not do that|no such repository"),
        (("org/", "writer"), "it must have the form org/name"),
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


def test_shards_are_found_by_the_index_however_they_are_named(hub, tmp_path):
    """Those of Qwen3.5 are no ``model-00001-of-00002.safetensors``."""
    shards = [f"model.safetensors-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}).encode()
    held = {"model.safetensors.index.json": File(index)} | {name: File(b"x", lfs=True) for name in shards}
    hub.hold("org/shards", held | {"consolidated.safetensors": File(b"of no use", lfs=True)})
    download_weights("org/shards")
    assert sorted(path.name for path in (tmp_path / "cache").rglob("*.safetensors")) == shards
    before = len(hub.requests)
    download_weights("org/shards")
    assert len(hub.requests) == before, "all of it is here"
    next((tmp_path / "cache").rglob(shards[0])).unlink()
    with offline(), pytest.raises(SeergateError, match="org/shards could not be downloaded: the Hub could not"):
        download_weights("org/shards")


def test_a_run_is_not_prepared_without_weights(hub, tmp_path):
    tiny_model("qwen3").save_pretrained(tmp_path / "model")
    byte_tokenizer(PLAIN).save_pretrained(tmp_path / "model")
    files = [file for file in (tmp_path / "model").iterdir() if file.suffix != ".safetensors"]
    hub.hold("org/weightless", {file.name: File(file.read_bytes()) for file in files})
    options = {
        "recipe": "paper",
        "data": "chain_sum",
        "data_limit": 2,
        "chain_sum_variables": (5, 5),
        "max_length": 128,
    }
    places = {"output_dir": str(tmp_path / "run"), "token_cache": str(tmp_path / "tokens")}
    config = load_train_config("org/weightless", options | places | {"block_size": 8, "gate_dim": 16})
    with pytest.raises(
        SeergateError, match="weights of org/weightless could not be downloaded: the repository has none"
    ):
        prepare_run(config)


def test_a_model_is_asked_for_once_and_in_the_cache_not_at_all(hub, bank, tmp_path, monkeypatch):
    """(A name of its own: transformers remembers the commit of a name.)"""
    from huggingface_hub import constants

    tiny_model("qwen3").save_pretrained(tmp_path / "model")
    byte_tokenizer(PLAIN).save_pretrained(tmp_path / "model")
    hub.hold(
        "org/asked",
        {file.name: File(file.read_bytes(), file.suffix == ".safetensors") for file in (tmp_path / "model").iterdir()}
        | {"model.fp16.safetensors": File(b"of no use", lfs=True)},
    )
    here = constants.ENDPOINT
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with hub_call("reading"):
        assert constants.HF_HUB_OFFLINE, "nothing is asked where nobody answers"
    assert not constants.HF_HUB_OFFLINE
    monkeypatch.setattr(constants, "ENDPOINT", here)
    revision = hub.repos["org/asked"].refs["main"]
    base_config("org/asked", revision=revision)
    load_tokenizer("org/asked", revision=revision)
    download_weights("org/asked", revision)
    assert len(hub.seen("HEAD", "^/$")) == 1
    (weights,) = (tmp_path / "cache").rglob("*.safetensors")
    assert weights.name == "model.safetensors"
    with offline(False), hub_call("reading"):
        assert not constants.HF_HUB_OFFLINE
    before = len(hub.requests)
    with offline():
        base_config("org/asked", revision=revision)
        load_tokenizer("org/asked", revision=revision)
        download_weights("org/asked", revision)
        assert load_base("org/asked", revision=revision).num_parameters()
    assert len(hub.requests) == before and not constants.HF_HUB_OFFLINE


@pytest.mark.parametrize("status", [401, 404, 503])
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


def test_other_kinds_of_repository(hub, bank):
    hub.create({"name": "gates", "organization": "org"}, "writer")
    repo = hub.repos[REPO]
    for files, message in (
        ({}, "holds no gate_config"),
        ({"config.json": b'{"model_type": "qwen3"}'}, "looks like a model"),
        ({"config.json": b'{"seerattn_use_rope": true}'}, "holds no attn_gate_weights.pth"),
    ):
        repo.commit("main", {path: File(data) for path, data in files.items()})
        with pytest.raises(SeergateError, match=message):
            GateBank.from_pretrained(REPO)


def test_a_published_checkpoint_is_read_from_the_hub(hub, tmp_path):
    tensors = SMALL.save(tmp_path / "published")
    hub.hold(REPO, {path.name: File(path.read_bytes()) for path in (tmp_path / "published").iterdir()})
    bank = GateBank.from_pretrained(REPO)
    weight = tensors["model.layers.1.self_attn.attn_gate.attngate_linear_k.weight"]
    assert torch.equal(bank.gate(1).k_proj.weight, weight) and bank.training_record["imported_from"] == REPO


def test_a_plot_of_results_that_are_gone_is_deleted(hub, bank):
    pytest.importorskip("matplotlib")
    bank.results = ({"task": "t", "method": "gate", "token_budget": 64, "accuracy": 0.5},)
    bank.push_to_hub(REPO, token="writer")
    assert "accuracy.png" in hub.repos[REPO].tree() and "accuracy.png" in card(hub)
    bank.results = ()
    bank.push_to_hub(REPO, token="writer")
    assert "accuracy.png" not in hub.repos[REPO].tree() and "accuracy.png" not in card(hub)


def test_commands(hub, bank, tmp_path, monkeypatch, capsys):
    """push, info and export."""
    monkeypatch.setenv("HF_TOKEN", "writer")
    bank.save_pretrained(tmp_path / "gates")
    own = tmp_path / "gates" / "README.md"
    own.write_text(own.read_text() + "\nWritten before it was pushed.\n")
    gates, half = str(tmp_path / "gates"), str(tmp_path / "half")
    assert main(["push", gates, REPO, "--private", "--message", "From the shell"]) == 0
    output = capsys.readouterr().out
    assert f"{hub.url}/{REPO}/commit/" in output and "lets others find it" in output
    assert "Written before it was pushed." in card(hub) and f'seergate.load("{REPO}"' in card(hub)
    assert hub.repos[REPO].private and hub.repos[REPO].log[-1]["summary"] == "From the shell"
    assert main(["info", REPO, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gates"]["block size"] == 8
    assert main(["export", REPO, half, "--dtype", "float16", "--layers", "1"]) == 0
    exported = GateBank.from_pretrained(half)
    assert exported.geometry.layers == (1,) and exported.gate(1).k_proj.weight.dtype == torch.float16
    assert main(["push", gates, "mine", "--token", "writer"]) == 0
    assert 'seergate.load("writer/mine"' in card(hub, "writer/mine")
    capsys.readouterr()
    assert main(["push", gates, "elsewhere/gates"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the gates could not be pushed") and error.count("\n") == 1


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
    options = {"repo_id": REPO, "token": "writer", "subfolder": "v1"}
    bank.save_pretrained(tmp_path / "my-gates", push_to_hub=True, **options)
    assert [*hub.repos] == [REPO]
    assert same(GateBank.from_pretrained(REPO, subfolder="v1"), bank)
    with pytest.raises(SeergateError, match="repo_id is 'my gates'; it must have the form org/name, or name"):
        bank.save_pretrained(tmp_path / "my gates", push_to_hub=True, token="writer")
    assert not (tmp_path / "my gates").exists(), "said before anything is written"
    with pytest.raises(SeergateError, match="the gates could not be pushed to new-gates: .*token is needed"):
        bank.save_pretrained(tmp_path / "new-gates", push_to_hub=True, token=False)
    assert [*hub.repos] == [REPO]


@pytest.mark.parametrize(
    ("place", "arguments"),
    [
        ({"revision": "main"}, ""),
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
