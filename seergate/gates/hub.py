"""Download gates from and push them to the Hugging Face Hub."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

from seergate.errors import SeergateError, did_you_mean
from seergate.gates.bank import Gates
from seergate.gates.card import CARD_FILE, LICENCE, Source, has_own_text
from seergate.gates.files import MARKER_FILE, read_card, save_adapter
from seergate.hub import hub_call
from seergate.paths import HUB_ID, directory_here, gguf_file, is_hub_id, shipped_name


def check_target(repo_id: str, revision: str | None, subfolder: str | None, create_pr: bool) -> None:
    """Check that a name has the form ``org/name``, or ``name`` for a repository in the user's namespace, and what else
    can be checked of the place of a push without the Hub.
    """
    if not isinstance(repo_id, str) or not (HUB_ID.fullmatch(repo_id) or re.fullmatch(r"[\w-][\w.-]*", repo_id)):
        raise SeergateError(f"repo_id is {repo_id!r}; it must have the form org/name, or name for one of your own")
    if create_pr and revision not in (None, "main"):
        raise SeergateError(f"revision is {revision!r}; a pull request goes to main, so leave it out")
    _inside(subfolder)


OPTIONS = {"token", "cache_dir", "local_files_only", "force_download"}
"""Options of `huggingface_hub` that `fetch` takes."""


def fetch(
    source: str, *, patterns: list[str], revision: str | None = None, subfolder: str | None = None, **hub: Any
) -> Path:
    """The directory of gates at ``source``, downloaded if it is a Hub repository.

    Args:
        source: local directory, shipped gates (``"checkpoints/tiny-reasoner/gates"``), or Hub repository.
        patterns: names of the files to download; ``*`` matches any text.
        revision: branch, tag or commit; only for a repository.
        subfolder: a directory inside ``source``.
        **hub: `OPTIONS`, as in `huggingface_hub`; ignored for a directory.

    Raises:
        SeergateError: if there are no gates of this name, an option is unknown, or the Hub refuses.
    """
    for name in sorted(hub.keys() - OPTIONS):
        raise SeergateError(f"gates are loaded without an option {name!r}; {did_you_mean(name, sorted(OPTIONS))}")
    inside = _inside(subfolder)
    here = directory_here(source)
    if here is not None:
        if revision is not None:
            raise SeergateError(f"revision is {revision!r}, but {source} is a directory, which has none; leave it out")
        return here / inside
    if gguf_file(source) is not None:
        raise SeergateError(f"{source} is a GGUF model, not gates; to use both: load(GATES, base_model={source!r})")
    if os.path.exists(source):
        raise SeergateError(f"{source} is a file; gates are a directory or a Hub repository")
    if HUB_ID.fullmatch(source) is None:
        raise SeergateError(
            f"there is no directory {source}, and it is no Hub id (org/name; gates of a folder: seergate export "
            "ORG/NAME DIR --subfolder FOLDER)"
        )
    from huggingface_hub import snapshot_download

    unread = f"there is no directory {source}, and the repository could not be read from the Hub"
    files = [str(inside / pattern) for pattern in patterns]
    with hub_call(unread, asks=not hub.get("local_files_only")):
        snapshot = snapshot_download(source, revision=revision, allow_patterns=files, **hub)
    return Path(snapshot) / inside


def base_note(base_model: str | None) -> str | None:
    """Note for pushed gates if their base model is neither on the Hub nor shipped; else ``None``."""
    here = None if base_model is None else directory_here(base_model)
    if base_model is None or is_hub_id(base_model) or (here is not None and shipped_name(here)):
        return None
    return (
        f"note: the base model is {base_model}, which is not on the Hub; `seergate push` with --base-model ORG/NAME "
        "lets others find it"
    )


def push_adapter(
    bank: Gates,
    repo_id: str,
    *,
    card: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    subfolder: str | None = None,
    commit_message: str = "Upload attention gates",
    commit_description: str | None = None,
    create_pr: bool = False,
) -> str:
    """Upload gates and their model card to the Hub; creates the repository and the branch if necessary.

    All files change in one commit, so a download never mixes two versions. The repository's other files and its
    owner's text around the generated part of the card are kept.

    Args:
        bank: the gates; without a licence they get their base model's.
        repo_id: ``org/name``, or ``name`` in the user's namespace.
        card: a README whose text outside of the generated part is kept; by default the repository's.
        private: whether a new repository is private; by default the organisation's setting. An existing public one is
            refused if true.
        token: access token for the Hub; by default the one of ``hf auth login``.
        revision: branch to commit to; by default ``main``.
        subfolder: directory of the gates in the repository.
        commit_message, commit_description: texts of the commit or the pull request.
        create_pr: open a pull request instead of committing.

    Returns:
        The URL of the commit or of the pull request.

    Raises:
        SeergateError: for a wrong argument, or if the Hub refuses, with its reason.
    """
    check_target(repo_id, revision, subfolder, create_pr)
    from huggingface_hub import CommitOperationAdd, HfApi

    api, inside = HfApi(token=token), _inside(subfolder)
    if not bank.licence:
        bank = bank.derived(licence=licence_of_base(bank, token))
    with hub_call(f"the gates could not be pushed to {repo_id}"), tempfile.TemporaryDirectory() as place:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id  # with the namespace
        if private and not api.model_info(repo_id).private:
            raise SeergateError(f"{repo_id} exists and is public; make it private on the Hub, or leave private out")
        if revision not in (None, "main"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        paths = map(PurePosixPath, api.list_repo_files(repo_id, revision=revision))
        present = {path.name for path in paths if path.parent == inside}
        directory = Path(place)
        if (card is None or not has_own_text(card)) and CARD_FILE in present:
            remote = api.hf_hub_download(repo_id, str(inside / CARD_FILE), revision=revision)
            card = read_card(Path(remote).parent)
        if card is not None:
            (directory / CARD_FILE).write_text(card, encoding="utf-8")
        save_adapter(bank, directory, card_source=Source(repo_id, revision, subfolder))
        # A config.json that is already in the repository may be a model's.
        names = sorted(path.name for path in directory.iterdir() if path.name not in present & {MARKER_FILE})
        operations: list[Any] = [CommitOperationAdd(str(inside / name), directory / name) for name in names]
        # `upload_folder` may take several commits, and opens pull requests as drafts.
        commit = api.create_commit(
            repo_id,
            operations,
            commit_message=commit_message,
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )
    return str(commit.pr_url or commit.commit_url)


def licence_of_base(bank: Gates, token: str | bool | None) -> dict[str, str]:
    """The licence in the base model's card, as for `Gates`; empty if none is found."""
    from huggingface_hub import HfApi, ModelCard

    name, revision = bank.geometry.base_model, bank.geometry.base_revision
    if name is None:
        return {}
    here = directory_here(name)
    try:
        if here is not None:
            data: Any = ModelCard.load(here / CARD_FILE, ignore_metadata_errors=True).data
        else:
            with hub_call("no licence"):  # without the Hub, at once
                data = HfApi(token=token).model_info(name, revision=revision).card_data
    except Exception:  # a card without a licence is no reason to fail
        return {}
    values = {key: getattr(data, key, None) for key in LICENCE}
    return {key: value for key, value in values.items() if isinstance(value, str) and value}  # of several, none


def _inside(subfolder: str | None) -> PurePosixPath:
    inside = PurePosixPath(subfolder or "")
    if inside.is_absolute() or ".." in inside.parts:
        raise SeergateError(f"subfolder is {subfolder!r}; it must be a path inside the repository")
    return inside
