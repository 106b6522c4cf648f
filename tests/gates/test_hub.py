"""Push and pull with the real client of the Hub, which talks to a stand-in on this machine."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi, constants, utils
from transformers import AutoModelForCausalLM

import seergate
from seergate import GateBank, GateConfig, SeergateError
from seergate.distill import load_train_config
from seergate.distill.trainer import prepare_run
from seergate.eval.run_plan import check_model
from seergate.gates.hub import base_note, licence_of_base
from seergate.hub import hub_call, offline, unanswered
from seergate.models.loading import base_config, download_weights, load_base
from tests.distill.conftest import PLAIN, byte_tokenizer
from tests.gates.conftest import CONFIG, WEIGHTS, metadata, run_example, same
from tests.gates.test_legacy import SMALL
from tests.support.hub_server import File, Hub, files_of
from tests.support.models import prompt, tiny_model
from tests.support.running import output_of, refusal, refused, run_seergate

REPO, UNREAD = "org/gates", "could not be read from the Hub"
FILES = {"README.md", "config.json", CONFIG, WEIGHTS}
W = {"token": "writer"}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that the client of this process talks to, with an empty cache and no token of its own."""
    utils.disable_progress_bars()
    with Hub() as standing_in:
        settings = {"ENDPOINT": standing_in.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
        settings |= {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_TOKEN_PATH": str(tmp_path / "token")}
        settings["HUGGINGFACE_CO_URL_TEMPLATE"] = standing_in.url + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in settings.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)  # it remembers its endpoint
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield standing_in


@pytest.fixture
def bank(bank):
    bank.training_record = {
        "config": {"data": "open-r1/OpenR1-Math-220k", "data_revision": "0" * 40},
        "kl_held_out": 0.5,
    }
    return bank


def pull(source=REPO, **options):
    return GateBank.from_pretrained(source, **options)


def card(hub, repo=REPO, revision="main", path="README.md"):
    return hub.repos[repo].tree(revision)[path].data.decode()


def test_push_and_pull(hub, bank, tmp_path):
    address = bank.push_to_hub(REPO, **W, commit_message="First", commit_description="of many")
    repo, first = hub.repos[REPO], hub.repos[REPO].refs["main"]
    assert address == f"{hub.url}/{REPO}/commit/{first}" and not repo.private and len(repo.log) == 2, "one commit"
    assert {*repo.tree()} == FILES | {".gitattributes"}
    assert repo.tree()["gate_model.safetensors"].lfs and not repo.tree()["gate_config.json"].lfs
    assert repo.log[-1]["summary"] == "First" and repo.log[-1]["description"] == "of many"
    refused(UNREAD, pull, local_files_only=True)
    for options, downloads in (({}, 1), ({}, 1), ({"force_download": True}, 2), ({"cache_dir": tmp_path / "own"}, 3)):
        again = pull(**options)
        assert same(again, bank) and again.geometry == bank.geometry
        assert len(hub.seen("GET", "/lfs/")) == downloads, "what is there is not downloaded again"
    request_count = len(hub.requests)
    assert same(pull(local_files_only=True), bank) and len(hub.requests) == request_count
    facts = metadata(card(hub))
    assert facts["library_name"] == "seergate" and facts["pipeline_tag"] == "text-generation"
    assert facts["datasets"] == ["open-r1/OpenR1-Math-220k"] and "seergate" in facts["tags"]
    (metric,) = facts["model-index"][0]["results"][0]["metrics"]
    assert (metric["type"], metric["value"]) == ("kl_divergence", 0.5)
    assert bank.push_to_hub(REPO, **W) == address and len(repo.log) == 2, "nothing has changed"

    other = GateBank(bank.config, bank.geometry)
    hub.fail("POST", "/commit/", 500)
    with pytest.raises(SeergateError):
        other.push_to_hub(REPO, **W)
    assert same(pull(), bank), "a push that fails leaves the old gates"
    pr = other.push_to_hub(REPO, token="reader", create_pr=True, commit_message="Better gates")
    assert pr == f"{hub.url}/{REPO}/discussions/1" and same(pull(revision="refs/pr/1"), other) and same(pull(), bank)
    refused("a pull request goes to main", other.push_to_hub, REPO, token="reader", create_pr=True, revision="dev")
    other.push_to_hub(REPO, **W)
    bank.cast(torch.float16).push_to_hub(REPO, **W, revision="half")
    assert same(pull(revision=first), bank) and same(pull(), other)
    assert same(pull(revision="half", dtype=torch.float64), bank.cast(torch.float16).cast(torch.float64))
    refused("it has no such revision", pull, revision="nowhere")


@pytest.mark.parametrize("based", [True, False])
@pytest.mark.parametrize("place", [{"revision": "main"}, {"revision": "half", "subfolder": "v1"}])
def test_the_cards_example_loads_what_was_pushed(hub, bank, place, based):
    if "subfolder" in place:  # what an example without the place would load
        GateBank(bank.config, bank.geometry).push_to_hub(REPO, **W)
    if not based:
        bank.geometry = replace(bank.geometry, base_model=None)
    bank.push_to_hub(REPO, **W, **place)
    inside = f"{place['subfolder']}/" if "subfolder" in place else ""
    assert {inside + name for name in FILES} <= {*hub.repos[REPO].tree(place["revision"])}
    names = run_example(card(hub, revision=place["revision"], path=f"{inside}README.md"))
    assert same(seergate.handle_of(names["model"]).method.bank if based else names["bank"], bank)
    for outside in ("../other", "a/../../b", "/etc"):
        refused("it must be a path inside", pull, subfolder=outside)


def test_private_repositories(hub, bank):
    bank.push_to_hub(REPO, **W, private=True)
    assert hub.repos[REPO].private and same(pull(**W), bank)
    missing = "no such repository, or it is private"
    for token, message in ((None, missing), (False, missing), ("reader", missing), ("forged", "not valid")):
        refused(message, pull, token=token, force_download=True, cache_dir="nowhere")
    bank.push_to_hub("org/open", **W)
    before = hub.repos["org/open"].refs["main"]
    refused("org/open exists and is public", bank.push_to_hub, "org/open", **W, private=True)
    assert hub.repos["org/open"].refs["main"] == before


def test_what_an_owner_has_in_the_repository_stays(hub, bank):
    hub.create({"name": "gates", "organization": "org"}, "writer")
    repo = hub.repos[REPO]
    files = {"README.md": File(b"---\nlanguage: en\nlicense: mit\n---\n# Mine\n"), "notes.txt": File(b"mine")}
    repo.commit("main", repo.tree() | files | {"config.json": File(b'{"model_type": "qwen3"}')})
    bank.push_to_hub(REPO, **W, revision="half")
    assert "# Mine" in card(hub, revision="half") and "## Use" in card(hub, revision="half")
    assert repo.tree()["README.md"] == files["README.md"]
    bank.results = ({"task": "t", "method": "gate", "token_budget": 64, "accuracy": 0.5},)
    bank.push_to_hub(REPO, **W)
    assert repo.tree()["config.json"].data == b'{"model_type": "qwen3"}' and same(pull(), bank)
    assert "## Results" in card(hub)
    repo.commit("main", repo.tree() | {"README.md": File(card(hub).encode() + b"\n## Thanks\n")})
    bank.training_record, bank.results = {**bank.training_record, "kl_held_out": 0.25}, ()
    bank.push_to_hub(REPO, **W)
    text = card(hub)
    facts = metadata(text)
    assert "# Mine" in text and text.rstrip().endswith("## Thanks") and "notes.txt" in repo.tree()
    assert (facts["language"], facts["license"]) == ("en", "mit") and text.count("# Attention gates for") == 1
    assert "0.25" in text and "0.5 " not in text and "## Results" not in text
    bank.push_to_hub(REPO, **W, card=text[text.index("<!-- seergate: what") : text.index("## Thanks")])
    assert "# Mine" in card(hub), "pushing a card without the owner's text does not delete that text on the Hub"


def test_base_at_its_pinned_revision_and_licence(hub, bank, tmp_path):
    """The repository of the base changes; the gates get the commit that they were made for."""
    api, changed = HfApi(token="writer"), tmp_path / "changed"
    (tmp_path / "base" / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    api.create_repo("org/base")
    api.upload_folder(repo_id="org/base", folder_path=tmp_path / "base")
    pinned = hub.repos["org/base"].refs["main"]
    gates = GateBank.for_model(AutoModelForCausalLM.from_pretrained("org/base"), GateConfig(8, 16))
    assert (gates.geometry.base_model, gates.geometry.base_revision) == ("org/base", pinned)
    gates.save_pretrained(tmp_path / "made")
    output_of("export", str(tmp_path / "made"), str(tmp_path / "copy"), "--base-model", "org/base")
    assert GateBank.from_pretrained(tmp_path / "copy").geometry.base_revision == pinned
    gates.push_to_hub(REPO, **W)
    text, expected = card(hub), {"base_model": "org/base", "base_model_relation": "adapter", "license": "apache-2.0"}
    assert expected.items() <= metadata(text).items() and pinned in text
    tiny_model("qwen3", seed=1).save_pretrained(changed)
    api.upload_folder(repo_id="org/base", folder_path=changed)
    model, expected = seergate.load(REPO, token_budget=16), tiny_model("qwen3")
    with seergate.attached(expected, gates, token_budget=16):
        tokens = expected.generate(input_ids=prompt(60), max_new_tokens=12)
    assert torch.equal(model.generate(input_ids=prompt(60), max_new_tokens=12), tokens)
    for base, is_pinned in (("org/base", True), (str(changed), False)):
        other = seergate.load(REPO, token_budget=16, base_model=base).get_input_embeddings().weight
        assert torch.equal(other, model.get_input_embeddings().weight) == is_pinned
    with pytest.warns(match=f"trained on org/base at commit {pinned}, and this is "):
        check_model("org/base", [], [gates])  # as `seergate eval` does, which reads the newest commit
    run_example(text)
    (tmp_path / "base" / "README.md").write_text("---\nlicense: [mit, apache-2.0]\n---\n")
    api.upload_file(path_or_fileobj=tmp_path / "base" / "README.md", path_in_repo="README.md", repo_id="org/base")
    assert licence_of_base(gates, None) == {"license": "apache-2.0"}, "of the pinned commit"
    newest = gates.derived(geometry=replace(gates.geometry, base_revision=None))
    assert licence_of_base(newest, None) == {}, "which of several holds for the gates is not said"
    elsewhere = {"cache_dir": tmp_path / "new", "local_files_only": True}
    refused(
        f"base model org/base at {pinned} is no directory.* gates name this commit",
        seergate.load,
        tmp_path / "made",
        **elsewhere,
    )


@pytest.mark.parametrize(
    ("fault", "repo", "token", "message"),
    [
        (("POST", "/api/repos/create", 500), REPO, "writer", "Hub server error 500"),
        (("GET", "/tree/", 401), REPO, "writer", "token is needed"),
        (("POST", "/commit/", 412), REPO, "writer", "somebody else has just changed"),
        (("POST", "/commit/", 403), REPO, "writer", "this token may not do that"),
        (("POST", "/commit/", 404), REPO, "writer", "404"),
        (None, REPO, "forged", "not valid"),
        (None, REPO, False, "token is needed"),
        (None, REPO, "reader", "may not do that|no such repository"),
        (None, "org/", "writer", "it must have the form org/name"),
        (None, "org/ga tes", "writer", "it must have the form org/name"),
        (None, "org/-gates--", "writer", "could not be"),
    ],
)
def test_push_refused(hub, bank, fault, repo, token, message):
    if fault:
        hub.fail(*fault, times=99)
    refused(message, bank.push_to_hub, repo, token=token)
    assert fault or not hub.repos


def test_pull_refused(hub, bank, monkeypatch):
    repo = hub.hold(REPO, {})
    for files, message in (
        ({}, r"^org/gates \(.*snapshots.*\) holds no gate_config"),
        ({"config.json": b'{"model_type": "qwen3"}'}, "looks like a model"),
        ({"config.json": b'{"seerattn_use_rope": true}'}, "holds no attn_gate_weights.pth"),
    ):
        repo.commit("main", {path: File(data) for path, data in files.items()})
        refused(message, pull)
    for status in (401, 404, 503):
        hub.fail("GET", "/api/models/", status, times=1)
        refused(UNREAD, pull, cache_dir="nowhere")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    refused("could not be pushed to org/gates: .*Connection refused", bank.push_to_hub, REPO, **W)
    refused(UNREAD, pull, "org/other")
    refused("export ORG/NAME DIR --subfolder FOLDER", pull, "org/model/gates")


@pytest.mark.parametrize("elsewhere", [False, True])
def test_only_bases_that_others_do_not_find_get_a_note(tmp_path, monkeypatch, elsewhere):
    if elsewhere:
        monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for found in ("org/base", "checkpoints/tiny-reasoner", None):
        assert base_note(found) is None, found
    for unknown in (str(tmp_path / "mine"), "/srv/models/another", "model.gguf"):
        assert unknown in (base_note(unknown) or ""), unknown


def test_the_hubs_reasons_in_further_lines_are_kept(hub):
    def fails():
        with hub_call("not pushed"):
            raise ValueError('Invalid metadata in README.md.\n- "license" must be one of [mit]')

    refused('not pushed: Invalid metadata in README.md. - "license" must be one of', fails)


def test_shards_are_found_by_the_index_however_they_are_named(hub, tmp_path):
    """Qwen3.5 has other names than ``model-00001-of-00002.safetensors``."""
    shards = [f"model.safetensors-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}).encode()
    repo_files = {"model.safetensors.index.json": File(index)} | {name: File(b"x", lfs=True) for name in shards}
    hub.hold("org/shards", repo_files | {"consolidated.safetensors": File(b"of no use", lfs=True)})
    download_weights("org/shards")
    assert sorted(path.name for path in (tmp_path / "cache").rglob("*.safetensors")) == shards
    before = len(hub.requests)
    download_weights("org/shards")
    assert len(hub.requests) == before, "all of it is here"
    next((tmp_path / "cache").rglob(shards[0])).unlink()
    with offline(), pytest.raises(SeergateError, match="org/shards could not be downloaded: the Hub could not"):
        download_weights("org/shards")
    for damaged in ("{", "{}", "[]", '{"weight_map": []}'):
        next((tmp_path / "cache").rglob("model.safetensors.index.json")).write_text(damaged)
        refused("index.json is no index of a model's weights; delete", download_weights, "org/shards")


@pytest.fixture
def files(tmp_path):
    tiny_model("qwen3", vocab_size=260).save_pretrained(tmp_path / "model")
    byte_tokenizer(PLAIN).save_pretrained(tmp_path / "model")
    return files_of(tmp_path / "model")


def test_a_run_is_not_prepared_without_weights(hub, files, tmp_path):
    hub.hold("org/weightless", {name: file for name, file in files.items() if not file.lfs})
    options = {"recipe": "paper", "data": "chain_sum", "data_limit": 2, "chain_sum_variables": (5, 5)}
    options |= {"output_dir": str(tmp_path / "run"), "token_cache": str(tmp_path / "tokens")}
    config = load_train_config("org/weightless", options | {"max_length": 128, "block_size": 8, "gate_dim": 16})
    refused("weights of org/weightless could not be downloaded: the repository has n", prepare_run, config)


def test_a_model_is_asked_for_once_and_in_the_cache_not_at_all(hub, files, tmp_path, monkeypatch):
    """The name occurs in no other test, because transformers remembers the commit of a name."""
    hub.hold("org/asked", files | {"model.fp16.safetensors": File(b"of no use", lfs=True)})
    revision = hub.repos["org/asked"].refs["main"]
    with monkeypatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        with hub_call("reading"):
            assert constants.HF_HUB_OFFLINE, "nothing is asked where nobody answers"
    assert not constants.HF_HUB_OFFLINE
    base_config("org/asked", revision=revision)
    download_weights("org/asked", revision)
    assert len(hub.seen("HEAD", "^/$")) == 1
    assert [path.name for path in (tmp_path / "cache").rglob("*.safetensors")] == ["model.safetensors"]
    with offline(False), hub_call("reading"):
        assert not constants.HF_HUB_OFFLINE
    request_count = len(hub.requests)
    with offline():
        base_config("org/asked", revision=revision)
        download_weights("org/asked", revision)
        assert load_base("org/asked", revision=revision).num_parameters()
    assert len(hub.requests) == request_count and not constants.HF_HUB_OFFLINE


def test_a_published_checkpoint_is_read_from_the_hub(hub, tmp_path):
    tensors = SMALL.save(tmp_path / "published")
    hub.hold(REPO, files_of(tmp_path / "published"))
    weight = tensors["model.layers.1.self_attn.attn_gate.attngate_linear_k.weight"]
    assert torch.equal(pull().gate(1).k_proj.weight, weight) and pull().training_record["imported_from"] == REPO


def test_commands(hub, bank, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "writer")
    bank.save_pretrained(tmp_path / "gates")
    own = tmp_path / "gates" / "README.md"
    own.write_text(own.read_text() + "\nWritten before it was pushed.\n")
    gates, half = str(tmp_path / "gates"), str(tmp_path / "half")
    output = output_of("push", gates, REPO, "--private", "--message", "From the shell")
    assert f"{hub.url}/{REPO}/commit/" in output and "lets others find it" in output
    assert "Written before it was pushed." in card(hub) and f'seergate.load("{REPO}"' in card(hub)
    assert hub.repos[REPO].private and hub.repos[REPO].log[-1]["summary"] == "From the shell"
    assert json.loads(output_of("info", REPO, "--json"))["gates"]["block size"] == 8
    output_of("export", REPO, half, "--dtype", "float16", "--layers", "1")
    assert same(pull(half), bank.subset([1]).cast(torch.float16))
    assert refusal(run_seergate("push", gates, "elsewhere/gates")).startswith("error: the gates could not be pushed")


@pytest.mark.parametrize(("status", "silent"), [(404, False), (499, False), (500, True), (503, True)])
def test_a_server_error_is_no_answer(status, silent):
    error = Exception("from the server")
    error.response = SimpleNamespace(status_code=status)
    assert unanswered(error) == silent
