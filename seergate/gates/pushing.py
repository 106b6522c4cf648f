"""Publishing an adapter on the Hub, in one commit."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from seergate.errors import SeergateError
from seergate.gates.card import Source, has_own_text
from seergate.gates.hub import check_repo_id, hub_errors, is_hub_id
from seergate.gates.layout import CARD_FILE, INDEX_FILE, PLOT_FILE, SIGN_FILE, is_sign, is_weights_file
from seergate.gates.reading import adapter_files
from seergate.gates.record import Adapter
from seergate.gates.saving import save_adapter


def push_adapter(
    directory: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    subfolder: str | None = None,
    commit_message: str = "Upload attention gates",
    commit_description: str | None = None,
    create_pr: bool = False,
) -> str:
    """Upload a saved adapter to the Hub, creating the repository and the branch if need be.

    All files change in one commit, so that no reader meets half of them. Weights of the adapter before it are removed;
    other files of the repository are left alone.

    Args:
        directory: what `save_adapter` wrote.
        repo_id: ``org/name``, or ``name`` in one's own namespace.
        private: whether a new repository is private; by default as its organisation wants it.
        token: for the Hub; by default the one of ``hf auth login``.
        revision: branch to commit to; by default ``main``.
        subfolder: where in the repository the adapter goes.
        commit_message, commit_description: of the commit or the pull request.
        create_pr: open a pull request instead of committing.

    Returns:
        The address of the commit, or of the pull request.

    Raises:
        SeergateError: if the Hub refuses, with its reason.
    """
    check_repo_id(repo_id)
    if create_pr and revision not in (None, "main"):
        raise SeergateError(f"revision is {revision!r}; a pull request goes to main, so leave it out")
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    source, inside = Path(directory), PurePosixPath(subfolder or "")
    names = adapter_files(source)
    api = HfApi(token=token)
    with hub_errors(f"the adapter could not be pushed to {repo_id}"):
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id  # in full
        if revision not in (None, "main"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        present = _present(api, repo_id, revision, inside)
        if SIGN_FILE in present and SIGN_FILE in names and not _is_sign(api, repo_id, revision, inside):
            names.remove(SIGN_FILE)  # the repository holds a model as well
        operations: list[Any] = [CommitOperationAdd(str(inside / name), source / name) for name in names]
        operations += [
            CommitOperationDelete(str(inside / name))
            for name in sorted(present - set(names))
            if is_weights_file(name) or name in (INDEX_FILE, PLOT_FILE)
        ]
        commit = api.create_commit(
            repo_id,
            operations,
            commit_message=commit_message,
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )
    return str(commit.pr_url or commit.commit_url)


def publish(
    adapter: Adapter,
    repo_id: str,
    *,
    card: str | None = None,
    max_shard_size: int | str = "5GB",
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    subfolder: str | None = None,
    **options: Any,
) -> str:
    """Save an adapter and upload it, with a card made for the Hub.

    Args:
        adapter: what to publish; without a licence it gets its base model's.
        repo_id: ``org/name``, or ``name`` in one's own namespace.
        card: a README whose own text is kept; by default the repository's.
        max_shard_size: of one weights file.
        private, token, revision, subfolder, **options: see `push_adapter`.

    Returns:
        The address of the commit, or of the pull request.

    Raises:
        SeergateError: if the Hub refuses, with its reason.
    """
    from huggingface_hub import HfApi

    check_repo_id(repo_id)
    if "/" not in repo_id:  # the card needs the full name, which only the Hub knows
        with hub_errors(f"the adapter could not be pushed to {repo_id}"):
            repo_id = HfApi(token=token).create_repo(repo_id, private=private, exist_ok=True).repo_id
    base = adapter.geometry
    if not adapter.licence:
        adapter = replace(adapter, licence=licence_of_base(base.base_model, revision=base.base_revision, token=token))
    if card is None or not has_own_text(card):
        card = remote_card(repo_id, token=token, revision=revision, subfolder=subfolder)
    with tempfile.TemporaryDirectory() as directory:
        if card is not None:
            (Path(directory) / CARD_FILE).write_text(card)
        source = Source(repo_id, revision, subfolder)
        save_adapter(adapter, directory, max_shard_size=max_shard_size, card_source=source)
        options |= {"private": private, "token": token, "revision": revision, "subfolder": subfolder}
        return push_adapter(directory, repo_id, **options)


def remote_card(
    repo_id: str, *, token: str | bool | None = None, revision: str | None = None, subfolder: str | None = None
) -> str | None:
    """The README of a repository, if there is one to be kept; ``None`` if there is none or no such repository.

    A branch that does not exist yet will be made from ``main``, so it is ``main``'s that counts.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        EntryNotFoundError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    check_repo_id(repo_id)
    name = str(PurePosixPath(subfolder or "") / CARD_FILE)
    with hub_errors(f"the README of {repo_id} could not be read"):
        try:
            path = HfApi(token=token).hf_hub_download(repo_id, name, revision=revision)
        except LocalEntryNotFoundError:  # the Hub cannot be reached
            raise
        except RevisionNotFoundError:
            return None if revision is None else remote_card(repo_id, token=token, subfolder=subfolder)
        except (EntryNotFoundError, RepositoryNotFoundError):
            return None
    return Path(path).read_text(errors="replace")


def licence_of_base(
    name: str | None, *, revision: str | None = None, token: str | bool | None = None
) -> dict[str, str]:
    """The licence that a base model's card states; empty if there is none to be found."""
    from huggingface_hub import HfApi, ModelCard

    if name is None:
        return {}
    card = Path(name) / CARD_FILE
    try:
        if card.is_file():
            data: Any = ModelCard.load(card, ignore_metadata_errors=True).data
        elif is_hub_id(name):
            data = HfApi(token=token).model_info(name, revision=revision).card_data
        else:
            return {}
    except Exception:  # a card without a licence is no reason to fail
        return {}
    values = {key: getattr(data, key, None) for key in ("license", "license_name", "license_link")}
    return {key: str(value) for key, value in values.items() if value}


def _present(api: Any, repo_id: str, revision: str | None, inside: PurePosixPath) -> set[str]:
    """The names of the files that lie where the adapter goes."""
    paths = [PurePosixPath(path) for path in api.list_repo_files(repo_id, revision=revision)]
    return {path.name for path in paths if path.parent == inside}


def _is_sign(api: Any, repo_id: str, revision: str | None, inside: PurePosixPath) -> bool:
    return is_sign(Path(api.hf_hub_download(repo_id, str(inside / SIGN_FILE), revision=revision)))
