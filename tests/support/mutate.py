"""Breaks the package in small ways, one at a time, and sees whether the tests notice.

    python -m pytest -n 2 --cov=seergate --cov-context=test  # which test runs which line: .coverage
    python -m tests.support.mutate --count 60                            # writes benchmarks/results/mutations.json

Places are drawn at random, the same number in each part of the package: comparisons, arithmetic, boolean operators,
numbers and truth values inside of functions, error messages left out. A mutation is run against the tests that execute
its line. Kernels are left out: compiled for a GPU, or in Triton's interpreter, coverage does not see them.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

import torch

from benchmarks.common import provenance

ROOT = Path(__file__).resolve().parents[2]
COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
COMPUTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult}
SKIPPED = (ast.Raise, ast.JoinedStr, ast.AnnAssign, ast.arguments, ast.Assert)
FIRST_TESTS = 60
"""At random; the others follow where these notice nothing."""


@dataclass
class Mutation:
    """One change: ``before`` at a place in a file becomes ``after``."""

    file: str
    line: int
    start: int
    end: int
    before: str
    after: str
    caught_by: str | None = None


def mutated(node: ast.AST) -> ast.AST | None:
    """The node with something changed, if it can be."""
    copy = deepcopy(node)
    if isinstance(copy, ast.Compare) and type(copy.ops[0]) in COMPARED:
        copy.ops[0] = COMPARED[type(copy.ops[0])]()
    elif isinstance(copy, ast.BinOp) and type(copy.op) in COMPUTED and not isinstance(copy.left, ast.Constant):
        copy.op = COMPUTED[type(copy.op)]()
    elif isinstance(copy, ast.BoolOp):
        copy.op = ast.Or() if isinstance(copy.op, ast.And) else ast.And()
    elif isinstance(copy, ast.UnaryOp) and isinstance(copy.op, ast.Not):
        copy = copy.operand
    elif isinstance(copy, ast.Constant) and isinstance(copy.value, bool):
        copy.value = not copy.value
    elif isinstance(copy, ast.Constant) and isinstance(copy.value, int):
        copy.value += 1
    else:
        return None
    return copy


def mutations(path: Path) -> list[Mutation]:
    """All places of a file where something can be changed."""
    text = path.read_bytes()
    begins = [0]
    for line in text.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    made: list[Mutation] = []

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, SKIPPED) or (isinstance(node, ast.FunctionDef) and "jit" in ast.dump(node)[:400]):
            return
        one_line = isinstance(node, ast.expr) and node.lineno == node.end_lineno
        if inside and one_line and (after := mutated(node)) is not None:
            start, end = (begins[node.lineno - 1] + column for column in (node.col_offset, node.end_col_offset))
            name = path.relative_to(ROOT).as_posix()
            made.append(Mutation(name, node.lineno, start, end, text[start:end].decode(), f"({ast.unparse(after)})"))
        for child in ast.iter_child_nodes(node):
            visit(child, inside or isinstance(node, ast.FunctionDef))

    visit(ast.parse(text), False)
    return made


def drawn(count: int, seed: int) -> list[Mutation]:
    """So many mutations, spread over the parts of the package."""
    parts: dict[str, list[Mutation]] = defaultdict(list)
    for path in sorted((ROOT / "seergate").rglob("*.py")):
        folders = path.relative_to(ROOT).parts[:-1]
        if "triton_impl" not in folders and "vllm" not in folders and "kernels" not in path.stem:
            parts["/".join(folders[:2])].extend(mutations(path))
    chance, names, chosen = random.Random(seed), sorted(parts), []
    while len(chosen) < count:
        part = parts[names[len(chosen) % len(names)]]
        chosen.append(part.pop(chance.randrange(len(part))))
    return chosen


def tests_of(coverage_file: Path) -> dict[tuple[str, int], list[str]]:
    """File and line -> the tests that run it."""
    from coverage import CoverageData

    data = CoverageData(str(coverage_file))
    data.read()
    tests_by_line: dict[tuple[str, int], list[str]] = {}
    for file in data.measured_files():
        name = os.path.relpath(file, ROOT)
        for line, contexts in data.contexts_by_lineno(file).items():
            tests_by_line[name, line] = sorted({context.rpartition("|")[0] for context in contexts if context})
    return tests_by_line


def run(mutation: Mutation, tests: list[str], copy: Path) -> None:
    """Apply a mutation in a copy of the tree, run the tests, take it back."""
    path = copy / mutation.file
    text = path.read_bytes()
    path.write_bytes(text[: mutation.start] + mutation.after.encode() + text[mutation.end :])
    tests = random.Random(mutation.start).sample(tests, len(tests))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not soak"]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    try:
        for some in filter(None, (tests[:FIRST_TESTS], tests[FIRST_TESTS:])):
            done = subprocess.run(
                [*command, *some], cwd=copy, env=environment, capture_output=True, text=True, timeout=1800, check=False
            )
            if done.returncode not in (0, 1, 2, 5):
                raise RuntimeError(f"pytest could not run these tests:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
            if done.returncode in (1, 2):
                failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                mutation.caught_by = failed[0].split(" - ")[0] if failed else "no test could be collected"
                break
    except subprocess.TimeoutExpired:
        mutation.caught_by = "it runs for ever"
    finally:
        path.write_bytes(text)


def main() -> None:
    """Draw, run, record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--coverage", type=Path, default=ROOT / ".coverage")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "mutations.json")
    options = parser.parse_args()
    chosen, running = drawn(options.count, options.seed), tests_of(options.coverage)
    with tempfile.TemporaryDirectory() as folder:
        copies: Queue[Path] = Queue()
        files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for job in range(options.jobs):
            copy = Path(folder) / str(job)
            for name in files.splitlines():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
            copies.put(copy)

        def one(mutation: Mutation) -> None:
            copy = copies.get()
            try:
                if tests := running.get((mutation.file, mutation.line)):
                    run(mutation, tests, copy)
            finally:
                copies.put(copy)
            outcome = mutation.caught_by or "SURVIVED"
            print(f"{mutation.file}:{mutation.line} {mutation.before} -> {mutation.after}: {outcome}", flush=True)

        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(one, chosen))
    caught = sum(mutation.caught_by is not None for mutation in chosen)
    record = {"machine": provenance(torch.device("cpu")), "seed": options.seed, "drawn": len(chosen), "caught": caught}
    record["mutations"] = [asdict(mutation) for mutation in chosen]
    options.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{caught} of {len(chosen)} are caught")


if __name__ == "__main__":
    main()
