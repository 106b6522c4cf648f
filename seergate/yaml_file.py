"""YAML files of options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from seergate.errors import SeergateError, first_line
from seergate.paths import resolve_file


class _Loader(yaml.SafeLoader):
    """A safe YAML loader that refuses repeated keys, of which PyYAML would take the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping; refuse repeated keys."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        names = list[tuple[str, Any]]()
        for key, _ in node.value:
            if (key.tag, key.value) in names:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is given again", problem_mark=key.start_mark)
            names.append((key.tag, key.value))
        return node


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    if re.match(r"[-+]?0[0-9_]|.*:", node.value):  # octal and to the base of 60 in YAML 1.1
        problem = f"{node.value} would be read as another number; write it without zeros before it and without colons"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    return int(loader.construct_yaml_int(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)


def read_yaml(path: Path) -> dict[str, Any]:
    """The options of a YAML file, in UTF-8, which may be one that ships with seergate (`resolve_file`).

    Raises:
        SeergateError: if it is missing, unreadable, not YAML, or not a mapping.
    """
    try:
        values = yaml.load(resolve_file(path).read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise SeergateError(f"the configuration file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SeergateError(f"the configuration file {path} cannot be read: {first_line(error)}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or first_line(error)
        where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise SeergateError(f"the configuration file {path}{where} is not YAML: {problem}") from error
    if not isinstance(values, dict):
        raise SeergateError(f"the configuration file {path} must hold 'option: value' lines")
    return values
