"""A run directory: pinned `config.yaml`, append-only `samples.jsonl`, and files derived from them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path
from typing import Any

import yaml

from seergate.durable import lock, naming, replacing
from seergate.errors import SeergateError
from seergate.json_file import read_json_text
from seergate.yaml_file import read_yaml

CONFIG, SAMPLES, METRICS, PROXIES = "config.yaml", "samples.jsonl", "metrics.json", "proxies.json"

FIELDS = ("completion", "gold", "n_prompt_tokens", "n_tokens", "finish_reason", "seconds", "pred", "correct")
"""What every sample of an answer holds beside its `Key`."""
FIELDS_OF_TEXTS = ("n_tokens", "loss", "dense_loss", "agreement")
"""What every scored text holds beside its `Key` and ``kl``."""

Key = tuple[str, str, int]
"""(task, problem id, sample index)"""

NOT_COMPARED = (
    "execution",
    "model.path",
    "gates.path",
    "gates.name",
    "task.source",
    "task.shots_source",
    "task.file",
    "method.nominal",
)
"""Parts of a configuration that do not affect results: how it was run, paths and names of the weights and problems
(which are fingerprinted), and descriptions of other parts in words."""


def run_directories(root: Path) -> list[Path]:
    """``root`` itself if it is a run directory, else the run directories in it; a `SeergateError` if there is none."""
    if not root.is_dir():
        what = "is a file; a report is about a directory of runs" if root.exists() else "does not exist"
        raise SeergateError(f"the run directory {root} {what}")
    if (root / CONFIG).is_file() and (root / SAMPLES).is_file():
        return [root]
    directories = sorted(path.parent for path in root.glob(f"*/{SAMPLES}"))
    if not directories:
        if deeper := sorted({str(path.parents[1]) for path in root.glob(f"*/*/{SAMPLES}")}):
            raise SeergateError(f"{root} holds no runs itself; give the directories in it: {' '.join(deeper)}")
        raise SeergateError(f"{root} holds no runs; `seergate eval --out {root} ...` makes some")
    return directories


def key_of(sample: dict[str, Any]) -> Key:
    """Key of a sample."""
    return sample["task"], sample["problem_id"], sample["sample_idx"]


def read_samples(directory: Path) -> list[dict[str, Any]]:
    """All complete samples of a run. An incomplete last line, left by a killed process, is skipped.

    Raises:
        SeergateError: if an earlier line is damaged, or a sample lacks a field or is there twice.
    """
    path = directory / SAMPLES
    if not path.exists():
        return []
    *lines, last = path.read_bytes().split(b"\n")
    lines += [last] if _is_whole(last) else []
    samples: list[dict[str, Any]] = []
    seen: set[Key] = set()
    for number, line in enumerate(lines, 1):
        try:
            sample = read_json_text(line)
            key = key_of(sample)
        except (ValueError, KeyError, TypeError) as error:
            raise SeergateError(
                f"{path}, line {number} is damaged; remove that line to have its sample made again"
            ) from error
        needed = FIELDS_OF_TEXTS if "kl" in sample else FIELDS
        if missing := [name for name in needed if name not in sample]:
            raise SeergateError(
                f"{path}, line {number} has a sample without {missing[0]!r}; remove that line to have it made again"
            )
        if key in seen:
            raise SeergateError(f"{path}, line {number} repeats the sample {key}; remove one of the two")
        seen.add(key)
        samples.append(sample)
    return samples


def in_order(samples: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Samples of a task in an order that does not depend on when they were made."""
    return sorted(samples, key=lambda sample: (sample["problem_id"], sample["sample_idx"]))


class SampleLog(AbstractContextManager["SampleLog"]):
    """Appends samples to a run. A sample survives a kill once `append` has returned; if that raises, nothing is
    written. One process at a time may hold it.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / SAMPLES
        self._file = path.open("ab+", buffering=0)
        lock(self._file, path, "use another directory")
        _mend_last_line(self._file)

    def append(self, sample: dict[str, Any]) -> None:
        """Write a sample and wait until it is on the disk."""
        append_line(self._file, sample)

    def __exit__(self, *error: object) -> None:
        self._file.close()


def append_line(file: FileIO, sample: dict[str, Any]) -> None:
    """Append a whole line of JSON or nothing, and wait until it is on the disk. The file is unbuffered: a buffer would
    write the rest of a line later, once there is room again.
    """
    text = (json.dumps(sample, ensure_ascii=False) + "\n").encode("utf-8", "replace")
    before = file.seek(0, os.SEEK_END)
    try:
        with naming(Path(str(file.name))):
            while text:
                text = text[file.write(text) :]  # a disk that becomes full writes only a part
            os.fsync(file.fileno())
    except BaseException:
        file.truncate(before)
        raise


def _mend_last_line(file: FileIO) -> None:
    """Add a missing newline after a complete last line; remove a last line that a kill has cut short."""
    file.seek(0)
    text = file.read()
    start = text.rfind(b"\n") + 1
    if _is_whole(text[start:]):
        file.write(b"\n")
    else:
        file.truncate(start)


def _is_whole(line: bytes) -> bool:
    """True if a line is a complete JSON object; a truncated object never parses."""
    try:
        return isinstance(read_json_text(line), dict)
    except ValueError:
        return False


def pin(directory: Path, config: dict[str, Any], *, finished: bool) -> None:
    """Write `config.yaml` if there are no samples, or else compare with the existing one, including the environment
    unless the run is finished.

    Raises:
        SeergateError: if the existing run has other settings, whose results must not be mixed; it names the fields. If
            there are samples and no `config.yaml`, since nobody knows their settings.
    """
    path, samples = directory / CONFIG, directory / SAMPLES
    if not samples.exists() or not samples.stat().st_size:
        write_yaml(path, config)
        return
    if not path.exists():
        raise SeergateError(
            f"{samples} is there without {CONFIG}, so the settings of its samples are unknown; restore {CONFIG}, "
            "or use another --out"
        )
    skipped = [*NOT_COMPARED]
    if finished:
        skipped += ["environment"]
    elif config["environment"]["device"] == "cuda":  # the GPU computes; another host may continue the run
        skipped += ["environment.hardware.cpu", "environment.hardware.cores"]
    if different := differences(read_config(directory), config, skipped):
        raise SeergateError(
            f"{directory} holds a run with other settings: {different}; use the same ones or another --out"
        )


def differences(before: dict[str, Any], now: dict[str, Any], skipped: Sequence[str]) -> str:
    """The first differences of two configurations in words, ignoring the parts ``skipped``; empty if there is none."""
    before, now = flatten(before), flatten(now)
    different = [
        f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in {**before, **now}
        if before.get(name) != now.get(name) and not any(name == s or name.startswith(s + ".") for s in skipped)
    ]
    return "; ".join(different[:3]) + (f" (and {len(different) - 3} more)" if len(different) > 3 else "")


def write_yaml(path: Path, config: dict[str, Any]) -> None:
    """`write_text` of a configuration."""
    write_text(path, yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


def read_config(directory: Path) -> dict[str, Any]:
    """The pinned configuration."""
    path = directory / CONFIG
    if not path.is_file():
        raise SeergateError(f"{directory} holds no {CONFIG}; it is not a run directory")
    return read_yaml(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON file, or ``None`` if it is not there."""
    try:
        value = read_json_text(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise SeergateError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise SeergateError(f"{path} is damaged: it does not hold an object of names and values")
    return value


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step, so that a reader never sees half of it."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8", errors="replace")


def write_json(path: Path, value: dict[str, Any]) -> None:
    """`write_text` of indented JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A flat dictionary, whose keys are the nested keys joined by dots."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
