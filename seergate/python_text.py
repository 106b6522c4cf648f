"""Python's standard library as a corpus: it is in every installation.

Which modules are held out follows from their paths alone. The texts are those of the Python that runs this, and a
module that another version has moved may change sides.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data", "encodings"}
"""Directories: other people's packages, tests, tables of data."""
HELD_OUT_OF = 16
"""One module of so many is held out."""


def modules(held_out: bool) -> dict[str, str]:
    """Path inside the library -> text, in the order of the paths.

    Args:
        held_out: those that no model was trained on, or the others.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if LEFT_OUT.isdisjoint(name.parts[:-1]) and is_held_out(name.as_posix()) == held_out:
            found[name.as_posix()] = path.read_text(encoding="utf-8", errors="replace")
    return found


def is_held_out(name: str) -> bool:
    """Whether a module is not to be trained on."""
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT_OF == 0
