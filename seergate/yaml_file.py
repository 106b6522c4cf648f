"""YAML files of options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from seergate.errors import SeergateError, first_line
from seergate.paths import resolve_file

MOST_VALUES = 100_000
"""Largest number of values in a file, where each alias (``*name``) counts as all values that it stands for."""


class _Loader(yaml.SafeLoader):
    """A safe YAML loader that refuses repeated keys, of which PyYAML would take the last, and aliases of aliases that
    stand for too many values.
    """

    def get_single_node(self) -> yaml.Node | None:
        """Compose the document."""
        node: yaml.Node | None = super().get_single_node()
        if node is not None and self._count(node, {}) > MOST_VALUES:
            raise yaml.MarkedYAMLError(
                problem=f"it holds more than {MOST_VALUES:,} values", problem_mark=node.start_mark
            )
        return node

    def _count(self, node: yaml.Node, counts: dict[int, int]) -> int:
        """Number of values in a node; ``counts`` holds those of nodes that were counted before."""
        if id(node) not in counts:
            counts[id(node)] = 1  # also where an alias stands inside the node that it names
            parts = node.value if isinstance(node, yaml.CollectionNode) else []
            each = [part for pair in parts for part in (pair if isinstance(pair, tuple) else (pair,))]
            counts[id(node)] += sum(self._count(part, counts) for part in each)
        return counts[id(node)]

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping; refuse repeated keys."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        names = list[tuple[str, Any]]()
        for key, _ in node.value:
            if (key.tag, key.value) in names:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is given again", problem_mark=key.start_mark)
            names.append((key.tag, key.value))
        return node


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
