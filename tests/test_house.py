"""The house rules: what may import what, how long a file may be, what the top level holds, what documents promise."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "seergate"
MAX_LINES = 420

# Listed from the ground up. A module imports from lower floors only, never from its own or a higher one; modules of
# the ground floor may import each other.
FLOORS: list[set[str]] = [
    {"errors", "durable", "config", "paths", "openmp", "chain_sum", "geometry", "fingerprint"},
    {"ops"},
    {"gate"},
    {"adapter"},
    {"bank", "methods"},
    {"host"},
    {"loading"},
    {"distill", "eval", "legacy"},
    {"report"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(FLOORS) for name in names}
TOP = len(FLOORS)

# The only imports that point up: (file, function) -> floor. They stand inside the function.
DOORS = {("bank.py", "for_model"): "host", ("bank.py", "distill_loss"): "distill"}

ATTENTION_NAMES = {"_attn_implementation", "_attn_implementation_internal", "_flash_attention_forward"}
# Private names of other libraries that are used outside host/; none of them is transformers'.
FOREIGN_PRIVATE_NAMES = {
    "_cache",  # lighteval
    "_dynamo_marked_constant",  # torch
    "_exit",  # os
    "_fingerprint",  # datasets
    "_lazy_init_hp_params_optimizer_state",  # deepspeed
    "_replace",  # named tuples
    "_set_pg_timeout",  # torch.distributed
}


def sources(package: Path = PACKAGE) -> list[Path]:
    return sorted(p for p in package.rglob("*.py") if "__pycache__" not in p.parts)


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[tuple[str, str | None, int, bool]]:
    """Every import of a file: dotted name, enclosing function, line, whether it is for type checkers only."""
    here = ("seergate", *path.relative_to(PACKAGE).with_suffix("").parts)

    def walk(node: ast.AST, function: str | None, typing_only: bool) -> Iterator[tuple[str, str | None, int, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield alias.name, function, child.lineno, typing_only
            elif isinstance(child, ast.ImportFrom):
                base = ".".join(
                    [*here[: len(here) - child.level], child.module or ""] if child.level else [child.module]
                )
                for alias in child.names:
                    yield f"{base.rstrip('.')}.{alias.name}", function, child.lineno, typing_only
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from walk(child, function, True)
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from walk(child, child.name, typing_only)
            else:
                yield from walk(child, function, typing_only)

    yield from walk(ast.parse(path.read_text()), None, False)


def floor_faults(path: Path) -> list[str]:
    """Imports of ``path`` that do not point down."""
    relative = path.relative_to(PACKAGE)
    own = relative.parts[0].removesuffix(".py")
    if own in ("__init__", "__main__"):
        return []  # the front door: it hands out everything
    if own not in LEVEL:
        return [f"{named(path)}: {own} stands on no floor; add it to FLOORS"]
    faults = []
    for name, function, line, typing_only in imports(path):
        parts = name.split(".")
        if parts[0] != "seergate" or len(parts) < 2 or parts[1] == own or typing_only:
            continue
        target = parts[1]
        if target not in LEVEL:
            # The front door hands out names from every floor, so only the highest may use it.
            if target != "__version__" and own != "cli":
                faults.append(f"{named(path)}:{line} imports {name} from the front door")
        elif DOORS.get((relative.as_posix(), function or "")) == target:
            continue
        elif LEVEL[target] >= LEVEL[own] and not LEVEL[target] == LEVEL[own] == 0:
            faults.append(f"{named(path)}:{line} imports {name}, which is not below {own}")
    return faults


@pytest.mark.parametrize("path", sources(), ids=named)
def test_imports_point_down(path: Path) -> None:
    assert not floor_faults(path)


def test_an_upward_import_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule itself, on a house built wrongly."""
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "ops").mkdir()
    files = {
        "ops/gate_kl.py": (
            "from seergate.decode.step import run",
            "from .. import bank",
            "import seergate.gates.gate",
        ),
        "bank.py": ("def load():\n    from seergate.hf import spec", "from seergate.methods import Quest"),
        "attic.py": ("import torch",),
    }
    allowed = {
        "ops/pooling.py": ("from . import reference", "from seergate.config import GateConfig", "import torch"),
        "bank.py": ("def for_model():\n    from seergate.hf import spec", "from seergate import ops, gate"),
        "gate.py": ("if TYPE_CHECKING:\n    from seergate.hf import spec",),
        "config.py": ("from seergate.errors import SeergateError",),
    }
    for expected, cases in ((1, files), (0, allowed)):
        for name, texts in cases.items():
            for text in texts:
                (tmp_path / name).write_text(text)
                assert len(floor_faults(tmp_path / name)) == expected, (name, text)


@pytest.mark.parametrize("path", sources(), ids=named)
def test_low_floors_know_no_transformers(path: Path) -> None:
    if LEVEL.get(path.relative_to(PACKAGE).parts[0].removesuffix(".py"), TOP) <= LEVEL["gate"]:
        names = {name.split(".")[0] for name, *_ in imports(path)}
        assert not names & {"transformers", "accelerate", "deepspeed", "datasets"}


def private_names_of_others(tree: ast.AST) -> set[str]:
    """Attributes ``_x`` that a file reads or sets, as ``a._x`` or ``getattr(a, "_x")``, and does not define itself."""
    used, own = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            (own if of_self else used).add(node.attr)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            used |= {arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)}
    return {name for name in used - own if re.match(r"_[a-z]", str(name))}


@pytest.mark.parametrize("path", sources(), ids=named)
def test_private_transformers_names_live_in_host(path: Path) -> None:
    if path.relative_to(PACKAGE).parts[0] == "host":
        return
    private = [n for n, *_ in imports(path) if n.startswith("transformers.") and re.search(r"\._[a-z]", n)]
    tree = ast.parse(path.read_text())
    private += [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value in ATTENTION_NAMES]
    assert not {*private, *private_names_of_others(tree)} - FOREIGN_PRIVATE_NAMES


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("model.config._commit_hash = 3", {"_commit_hash"}),
        ("x = getattr(model.config, '_commit_hash', None)", {"_commit_hash"}),
        ("x = model._prefill(ids).__class__", {"_prefill"}),
        ("class A:\n    def _own(self): return self._made\n\ndef f(a): return a._own() + a._made", set()),
        ("def _own(): pass\n\nx = f(_own, getattr(y, name), y.public)", set()),
    ],
)
def test_a_private_name_is_noticed(text: str, found: set[str]) -> None:
    assert private_names_of_others(ast.parse(text)) == found


def test_no_long_files() -> None:
    roots = [ROOT / name for name in ("seergate", "train", "benchmarks", "tests") if (ROOT / name).is_dir()]
    files = [*ROOT.glob("*.py"), *(path for root in roots for path in sources(root))]
    lengths = {named(path): len(path.read_text().splitlines()) for path in files}
    assert len(lengths) > 10
    assert not {name: lines for name, lines in lengths.items() if lines > MAX_LINES}


def undocumented(path: Path) -> list[str]:
    """Public functions, methods and classes of a file without a docstring."""
    tree = ast.parse(path.read_text())
    missing = [] if ast.get_docstring(tree) or not tree.body else [f"{named(path)}: the module"]

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name.startswith(
                "_"
            ):
                continue
            decorators = {ast.unparse(d).split(".")[-1] for d in node.decorator_list}
            if not ast.get_docstring(node) and not decorators & {"overload", "override", "setter"}:
                missing.append(f"{named(path)}:{node.lineno} {prefix}{node.name}")
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")

    if not path.stem.startswith("_") or path.stem == "__init__":
        visit(tree.body, "")
    return missing


@pytest.mark.parametrize("path", sources(), ids=named)
def test_public_names_are_documented(path: Path) -> None:
    assert not undocumented(path)


def test_importing_seergate_does_nothing_else() -> None:
    """No heavy library is loaded and no setting of the process changes, until a name is used."""
    code = """
import logging, os, sys, warnings
before = dict(os.environ), list(warnings.filters), logging.getLogger().handlers[:]
import seergate
assert before == (dict(os.environ), list(warnings.filters), logging.getLogger().handlers[:])
print(*sorted({name.split(".")[0] for name in sys.modules}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    heavy = {"transformers", "deepspeed", "datasets", "accelerate", "triton", "matplotlib", "tensorboard"}
    assert not heavy & set(done.stdout.split())


def test_top_level() -> None:
    names = """
        LICENSE README.md CONTRIBUTING.md CHANGELOG.md CITATION.cff Makefile pyproject.toml constraints.txt train.py
        .ci/run .gitignore .pre-commit-config.yaml configs ds_configs docs/index.md
        seergate/__init__.py seergate/py.typed
    """
    for name in names.split():
        assert (ROOT / name).exists(), name
    assert (ROOT / ".ci/run").stat().st_mode & 0o111, ".ci/run must be executable"


def test_one_version() -> None:
    import seergate

    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert seergate.__version__ == version
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f'version: "{version}"' in (ROOT / "CITATION.cff").read_text()


def test_front_door() -> None:
    import seergate

    for name in ("load", "attach", "attached", "distill", "GateConfig", "GateBank", "DecodeConfig", "ops"):
        assert getattr(seergate, name) is not None
        assert name in dir(seergate)


def code_blocks(path: Path, *languages: str) -> list[str]:
    """The fenced blocks of a Markdown file in one of the languages."""
    return [
        body for lang, body in re.findall(r"^```(\w+)\n(.*?)^```", path.read_text(), re.M | re.S) if lang in languages
    ]


def shell_lines(block: str) -> list[str]:
    """Its commands, without comments, with continued lines joined."""
    return [line.split("#")[0].strip() for line in block.replace("\\\n", " ").splitlines()]


DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "train").rglob("*.md")])


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_documented_commands_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    commands = {p.stem.replace("_", "-") for p in (PACKAGE / "cli").glob("*.py")}
    for block in code_blocks(path, "bash", "sh", "console"):
        for line in shell_lines(block):
            if match := re.match(r"make ([a-z]+)$", line):
                assert match[1] in targets, line
            if match := re.match(r"seergate ([a-z-]+)", line):
                assert match[1] in commands, line
            for script in re.findall(r"\b[\w/]+\.py\b", line):
                assert (ROOT / script).exists(), line
    for block in code_blocks(path, "python"):
        compile(block, named(path), "exec")


def documented_options() -> dict[str, set[str]]:
    """Command -> the options that the documents pass to it."""
    found: dict[str, set[str]] = {}
    for path in DOCUMENTS:
        for block in code_blocks(path, "bash", "sh", "console"):
            for line in shell_lines(block):
                if match := re.search(r"(seergate [a-z-]+|\btrain\.py|\S+/pretrain\.py)(.*)", line):
                    found.setdefault(match[1], set()).update(re.findall(r"--[a-z][a-z-]*", match[2]))
    return found


@pytest.mark.parametrize(("command", "options"), documented_options().items())
def test_documented_options_exist(command: str, options: set[str]) -> None:
    name, *arguments = command.split()
    main = "import sys; from seergate.cli.main import main; sys.exit(main())"
    start = ["-c", main] if name == "seergate" else [name]
    wide = os.environ | {"COLUMNS": "200"}  # so that no option is wrapped
    line = [sys.executable, *start, *arguments, "--help"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False, env=wide)
    assert done.returncode == 0, done.stderr
    assert not {option for option in options if not re.search(rf"{option}\b", done.stdout)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" not in target and not target.startswith(("#", "mailto:")):
            linked = (path.parent / target.split("#")[0]).resolve()
            assert linked.is_relative_to(ROOT) and linked.exists(), f"{named(path)} links to {target}"


def tracked_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not done.stdout:
        pytest.skip("not a git checkout")
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_paths_of_somebodys_machine() -> None:
    absolute = re.compile(r"(?<![\w./:}~-])/(?:home|root|work|Users|mnt|scratch)/[\w.]+")
    outside = re.compile(r"(?:\.\./)+[A-Za-z_.][\w./-]*")
    faults = []
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue  # weights and pictures
        faults += [f"{named(path)}: {found}" for found in absolute.findall(text)]
        for found in outside.findall(text):
            if not (path.parent / found).resolve().is_relative_to(ROOT):
                faults.append(f"{named(path)}: {found} leads out of the repository")
    assert not faults


def test_tracked_files_are_small() -> None:
    big = {named(p): p.stat().st_size for p in tracked_files() if p.stat().st_size > 5 << 20}
    assert not {name: size for name, size in big.items() if not name.startswith("checkpoints/")}
