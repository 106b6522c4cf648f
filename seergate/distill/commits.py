"""Pinned Hub commits: a run keeps reading the commits that it started with, even if a branch moves.

The main process looks them up once and stores them in ``commits.json``: model or dataset -> the requested revision
(``asked``) and the commit that it resolved to (``commit``).
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
from seergate.hub import cached_commit, hub_call, unanswered
from seergate.models.families import base_commit
from seergate.models.loading import base_config
from seergate.paths import is_local_model

FILE = "commits.json"
REVISIONS = ("revision", "data_revision")
"""Options that name a revision on the Hub."""


def pin(config: TrainConfig, directory: Path) -> tuple[TrainConfig, dict[str, Any]]:
    """Replace the revisions of a run by commits.

    Args:
        config: configuration of the run. A stored commit is reused if the configuration names no revision, the same
            revision as before, or that commit. Without ``resume``, all commits are looked up again.
        directory: directory of ``commits.json``.

    Returns:
        The configuration with commits as its revisions, where they are known, and the entries to pass to `keep`.
    """
    recorded = _read(directory / FILE) if config.resume else {}
    resolved: dict[str, Any] = {}

    def commit(
        kind: str, run: TrainConfig, revision: str | None, look_up: Callable[[TrainConfig], str | None]
    ) -> str | None:
        place = f"{kind} {getattr(run, kind)}"
        entry = recorded.get(place, {})
        if not entry.get("commit") or revision not in (None, entry["asked"], entry["commit"]):
            entry = {"asked": revision, "commit": look_up(run)}
        if entry["commit"]:
            resolved[place] = entry
        return entry["commit"] or revision

    config = replace(config, revision=commit("model", config, config.revision, model_commit))
    revisions = [commit("data", one, one.data_revision, data_commit) for one, _ in config.sources]
    return config.with_data_revisions(revisions), recorded | resolved


def keep(entries: dict[str, Any], directory: Path) -> None:
    """Write the entries that `pin` returned to ``commits.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    with replacing(directory / FILE) as draft:
        draft.write_text(json.dumps(entries, indent=1), encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    try:
        entries: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        return {place: dict(entry) for place, entry in entries.items()}
    except FileNotFoundError:
        return {}
    except (AttributeError, TypeError, ValueError) as error:
        raise SeergateError(f"{path} is damaged; delete it to begin with the newest commits") from error


def model_commit(config: TrainConfig) -> str | None:
    """Return the commit of the run's model; ``None`` for a local model, or if transformers does not record it."""
    path = locate_model(config).model
    base = base_config(path, revision=config.revision)  # reports a damaged model before the Hub is asked for data
    if is_local_model(path):
        return None
    return cached_commit(path, config.revision) or base_commit(base)  # newer releases of transformers


def data_commit(config: TrainConfig) -> str | None:
    """Return the commit of the run's dataset; ``None`` if it is not on the Hub or its commit is unknown.

    If the Hub does not answer, return the downloaded commit; raise `SeergateError` if the revision was not downloaded.
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
            return ref.read_text(encoding="utf-8").strip()
        raise SeergateError(
            f"the Hub does not answer, so the revision {revision!r} of the dataset {config.data!r} cannot be looked "
            f"up; to use the commit that was downloaded last, set data_revision to {last}"
        )
