"""The stages of `dvc.yaml` make the results in the documents, and their commands exist."""

import hashlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from seergate.cli.main import COMMANDS
from tests.test_house import ROOT, check_options

RESULTS = ROOT / "benchmarks" / "results"
REPRODUCE = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", RESULTS / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def with_values(part: Any, values: dict[str, str]) -> Any:
    """Replace ``${...}`` in a part of a template, as DVC does."""
    if isinstance(part, dict):
        return {with_values(key, values): with_values(value, values) for key, value in part.items()}
    if isinstance(part, list):
        return [with_values(value, values) for value in part]
    return re.sub(r"\$\{(.+?)\}", lambda match: values[match[1]], part) if isinstance(part, str) else part


def stages() -> dict[str, dict[str, Any]]:
    """Stages by name; those of a ``foreach`` are named ``group@key``."""
    stages_by_name = {}
    for name, stage in yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"].items():
        if "foreach" not in stage:
            stages_by_name[name] = stage
            continue
        for key, item in stage["foreach"].items():
            values = {"key": key} | {f"item.{field}": value for field, value in item.items()}
            stages_by_name[f"{name}@{key}"] = with_values(stage["do"], values)
    return stages_by_name


STAGES = stages()
OUTPUTS = {path: name for name, stage in STAGES.items() for out in stage["outs"] for path in out}
LOCK: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "dvc.lock").read_text())["stages"]


def shown() -> set[str]:
    """Pictures and result files that the documents name."""
    paths = set()
    for page in DOCUMENTS:
        text = page.read_text(encoding="utf-8")
        paths |= {f"docs/{name}" for name in re.findall(r"images/[\w.-]+\.(?:png|svg)", text)}
        paths |= set(re.findall(r"benchmarks/results/[\w.-]+\.jsonl?", text))
    notes = (RESULTS / "README.md").read_text(encoding="utf-8")
    local = set(re.findall(r"\]\(([\w.-]+\.jsonl?)\)", notes))
    for heading in re.findall(r"^## ([\w, -]+)$", notes, re.M):
        for name in heading.split(", "):
            local |= {path.name for pattern in (f"{name}.json", f"{name}-*.json") for path in RESULTS.glob(pattern)}
    return paths | {f"benchmarks/results/{name}" for name in local}


def commands(stage: dict[str, Any]) -> list[list[str]]:
    """The words of each command of a stage."""
    lines = stage["cmd"] if isinstance(stage["cmd"], list) else [stage["cmd"]]
    parts = [part.strip() for line in lines for part in re.split(r"&&|;", line)]
    return [shlex.split(part) for part in parts if not re.match(r"\w+=", part)]


def script_of(words: list[str]) -> str:
    """The file that ``python WORDS`` runs."""
    return f"{words[1].replace('.', '/')}.py" if words[0] == "-m" else words[0]


def test_what_the_documents_show_has_a_stage() -> None:
    assert len(shown()) > 25
    without = {path for path in shown() if path not in OUTPUTS}
    excepted = set(re.findall(r"`([\w.-]+)`", REPRODUCE.partition("Without a stage are")[2].partition("Of older")[0]))
    assert {Path(path).name for path in without} <= excepted
    assert not {Path(path).name for path in OUTPUTS} & excepted


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_has_what_it_needs(name: str) -> None:
    stage = STAGES[name]
    for path in stage["deps"]:
        assert path in OUTPUTS or (ROOT / path).exists(), path
    for path in (path for out in stage["outs"] for path in out):
        assert path.startswith("runs/") or (ROOT / path).exists(), path
    assert re.match(r"(less than )?[\d.]+ min|seconds|no time|not measured", stage["desc"])
    for program, *words in commands(stage):
        if program == "seergate":
            assert words[0] in {*COMMANDS, "figure"}, words
        elif program.endswith("python"):
            script = script_of(words)
            assert (ROOT / script).is_file(), script
            assert any(Path(script).is_relative_to(dep) for dep in stage["deps"]), f"{script} is no dependency"
        else:
            assert program == "rm", program


def test_options_of_stages_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    options_by_command: dict[str, set[str]] = {}
    for program, *words in (command for stage in STAGES.values() for command in commands(stage)):
        if program != "rm" and words[0] != "figure":
            command = f"seergate {words[0]}" if program == "seergate" else script_of(words)
            options_by_command.setdefault(command, set()).update(word for word in words if word.startswith("--"))
    check_options(options_by_command, monkeypatch)


def test_what_is_locked_is_what_there_is() -> None:
    """No result was changed by hand, and pictures show the present results."""
    assert LOCK.keys() <= STAGES.keys() and LOCK
    for name, stage in LOCK.items():
        results = [dep for dep in stage["deps"] if dep["path"].startswith("benchmarks/results/")]
        pictures = [out for out in stage["outs"] if not out["path"].endswith(".md")]
        for file in results + pictures:
            digest = hashlib.md5((ROOT / file["path"]).read_bytes()).hexdigest()
            assert digest == file["md5"], f"{file['path']}: make results STAGE='--single-item {name}'"


def test_the_tables_are_those_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import tables

    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        assert tables.filled(text) == text, "make results STAGE='--single-item tables'"
    written = "".join(page.read_text(encoding="utf-8") for page in tables.PAGES)
    assert set(re.findall(r"<!-- table: (\S+) -->", written)) == set(tables.TABLES)


def test_results_name_machine_versions_and_commit() -> None:
    """The documents list the older files that do not."""
    older = REPRODUCE.partition("Of older files")[2].partition("##")[0]
    lacking = set()
    for path in RESULTS.glob("*.json"):
        machine = json.loads(path.read_text()).get("machine", {})
        if not {"device", "python", "torch", "commit"} <= machine.keys():
            lacking.add(path.name)
    assert lacking == {name for name in re.findall(r"`([\w.]+)`", older) if name.endswith(".json")}
