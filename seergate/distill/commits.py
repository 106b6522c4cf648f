"""Pinned Hub commits of a run. A branch moves on; a run stays at the commits that it began with.

They are looked up once, by the main process, and kept in ``commits.json``: place -> the revision that was asked for,
and the commit that it meant.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from seergate.distill.config import TrainConfig, locate_model
from seergate.distill.sources import COMMIT, may_be_on_hub, unloadable
from seergate.durable import replacing
from seergate.errors import SeergateError
from seergate.hf.loading import base_config
from seergate.hub import cached_commit, hub_call, unanswered
from seergate.models.families import base_commit
from seergate.paths import is_local_model

FILE = "commits.json"
REVISIONS = ("revision", "data_revision")
"""Options of a run that name a revision on the Hub."""


def pin(config: TrainConfig, directory: Path) -> tuple[TrainConfig, dict[str, Any]]:
    """Look up the commits that a run reads.

    Args:
        config: the run as the user asks for it. A commit that is kept already is used again if the revision is the one
            that was asked for then, or none. With ``resume`` off, the newest commits are looked up.
        directory: where they are kept.

    Returns:
        The run with commits as its revisions, as far as they are known, and the entries to `keep`.
    """
    kept = _read(directory / FILE) if config.resume else {}
    found: dict[str, Any] = {}

    def commit(
        kind: str, run: TrainConfig, asked: str | None, look_up: Callable[[TrainConfig], str | None]
    ) -> str | None:
        place = f"{kind} {getattr(run, kind)}"
        entry = kept.get(place, {})
        if not entry.get("commit") or asked not in (None, entry["asked"], entry["commit"]):
            entry = {"asked": asked, "commit": look_up(run)}
        if entry["commit"]:
            found[place] = entry
        return entry["commit"] or asked

    config = replace(config, revision=commit("model", config, config.revision, model_commit))
    revisions = [commit("data", one, one.data_revision, data_commit) for one, _ in config.sources]
    return config.with_data_revisions(revisions), kept | found


def keep(entries: dict[str, Any], directory: Path) -> None:
    """Write the entries that `pin` has found."""
    directory.mkdir(parents=True, exist_ok=True)
    with replacing(directory / FILE) as draft:
        draft.write_text(json.dumps(entries, indent=1))


def _read(path: Path) -> dict[str, Any]:
    try:
        entries: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise SeergateError(f"{path} is damaged; delete it to begin with the newest commits") from error
    return entries


def model_commit(config: TrainConfig) -> str | None:
    """The commit of a run's model; ``None`` if it is on this machine, or if the library does not tell."""
    path = locate_model(config).model
    found = base_config(path, revision=config.revision)  # a damaged model is told before the Hub is asked for data
    if is_local_model(path):
        return None
    return cached_commit(path, config.revision) or base_commit(found)  # newer releases of transformers


def data_commit(config: TrainConfig) -> str | None:
    """The commit of a run's dataset; ``None`` if it is not on the Hub.

    If the Hub does not answer, the commit that was downloaded last.
    """
    if not may_be_on_hub(config):
        return None
    revision = config.data_revision
    if revision is not None and COMMIT.fullmatch(revision):
        return revision
    from datasets import load_dataset_builder
    from huggingface_hub import constants, dataset_info

    with hub_call(unloadable(config)):
        try:
            return str(dataset_info(config.data, revision=revision).sha)
        except Exception as error:
            if not unanswered(error):
                raise
        last = str(load_dataset_builder(config.data, config.data_config).hash)
        if revision is None:
            return last if COMMIT.fullmatch(last) else None
        ref = Path(constants.HF_HUB_CACHE) / f"datasets--{config.data.replace('/', '--')}" / "refs" / revision
        if ref.is_file():
            return ref.read_text().strip()
        raise SeergateError(
            f"the Hub does not answer, so the revision {revision!r} of the dataset {config.data!r} cannot be looked "
            f"up; to use the commit that was downloaded last, set data_revision to {last}"
        )
