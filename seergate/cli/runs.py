"""Commands about finished runs: ``report``, ``regrade`` and ``eval show``."""

from __future__ import annotations

import argparse
from pathlib import Path

from seergate.checks import check_counts
from seergate.cli.arguments import Command, given
from seergate.cli.console import say_report
from seergate.errors import SeergateError
from seergate.eval import store

REPORT_HELP = (
    "tables, plots and findings of finished runs",
    "Write report.md, report.html and plots about a run directory, or about all runs in a directory: accuracy and\n"
    "generation length against budget, recall by layer, cost, and what can and cannot be concluded.",
    [
        "seergate report runs/eval-tiny-reasoner-chain_sum",
        "seergate report runs/first-gates runs/second-gates --out runs/both",
    ],
)


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN_DIR", help="directory of `seergate eval`; several are compared"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="directory of the report [the first RUN_DIR]")


def _report(options: argparse.Namespace) -> None:
    from seergate.eval.report import write_report

    first, *others = options.runs
    say_report(write_report(first, options.out, *others))


REPORT = Command(REPORT_HELP, _report_arguments, _report, TAKES_METHODS=True)

REGRADE_HELP = (
    "grade stored samples again",
    "Grade the samples of one run directory, or of all run directories in a directory, with the present graders, and\n"
    "recompute metrics.json. The completions do not change; changed grades are printed.",
    ["seergate regrade runs/eval-tiny-reasoner-chain_sum", "seergate regrade RUN --dry-run"],
)


def _regrade_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of `seergate eval`")
    parser.add_argument(
        "--grader", help="new grader of the run: math, exact, letter, digit, contains, number or program"
    )
    parser.add_argument("--dry-run", action="store_true", help="only print what would change")
    parser.add_argument(
        "--run-programs", action="store_true", help="allow that programs in the answers run, confined (humaneval)"
    )
    parser.add_argument("--processes", type=int, metavar="N", help="[the cores that this process may use]")


def _regrade(options: argparse.Namespace) -> None:
    from seergate.eval.regrade import regrade
    from seergate.resources import available_cores

    check_counts(options, optional=True, processes=1)
    options.processes = options.processes or available_cores()
    any_changed = False
    for directory in store.run_directories(options.run_dir):
        result = regrade(directory, **given(options, "grader", "dry_run", "processes", "run_programs"))
        if not result.total:
            print(f"{directory}: no answers to grade")
            continue
        print(
            f"{directory}: {result.total} samples, {len(result.changed)} changed; accuracy "
            f"{100 * result.before:.1f} % -> {100 * result.after:.1f} %"
        )
        for problem, sample, old, new in result.changed[:10]:
            print(f"  problem {problem}, sample {sample}: {old} -> {new}")
        if len(result.changed) > 10:
            print(f"  and {len(result.changed) - 10} more")
        any_changed |= bool(result.changed)
    if any_changed and not options.dry_run:
        print("reports from before show the earlier grades; `seergate report` writes them again")


REGRADE = Command(REGRADE_HELP, _regrade_arguments, _regrade)

HEAD, TAIL = 400, 1200
"""Characters shown of the start and of the end of a completion without ``--full``; the answer is at the end."""

SHOW_HELP = (
    "a problem's answers in a run, with the reason for each grade",
    "Print what was asked, what every sample answered, and why it was graded as it was.",
    [
        "seergate eval show runs/eval-tiny-reasoner-chain_sum/gate-128 40-0-3",
        "seergate eval show RUN PROBLEM --sample 2 --full",
    ],
)


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="one run directory (it holds samples.jsonl)")
    parser.add_argument("problem", metavar="PROBLEM", help="the problem's id")
    parser.add_argument("--sample", type=int, metavar="N", help="only this sample [all]")
    parser.add_argument("--full", action="store_true", help="whole completions instead of their ends")


def _show(options: argparse.Namespace) -> None:
    if not (options.run_dir / store.CONFIG).is_file():
        runs = ", ".join(path.name for path in store.run_directories(options.run_dir))
        raise SeergateError(f"{options.run_dir} holds several runs; name one of them: {runs}")
    config = store.read_config(options.run_dir)
    samples = store.read_samples(options.run_dir)
    if samples and "completion" not in samples[0]:
        raise SeergateError(f"{options.run_dir} holds texts that were scored, and no answers; see its report")
    shown = [s for s in samples if str(s["problem_id"]) == options.problem]
    if not shown:
        ids = sorted({str(s["problem_id"]) for s in samples})
        some = ", ".join(ids[:5]) + (", ..." if len(ids) > 5 else "")
        raise SeergateError(
            f"{options.run_dir} has no sample of a problem {options.problem!r}; it has {some or 'none'}"
        )
    if options.sample is not None:
        shown = [s for s in shown if s["sample_idx"] == options.sample]
        if not shown:
            raise SeergateError(f"problem {options.problem!r} has no sample {options.sample} in {options.run_dir}")
    shown.sort(key=lambda s: s["sample_idx"])
    print(f"task {config['task']['name']}, problem {options.problem}, grader {config['task']['grader']}")
    print(f"gold answer: {shown[0]['gold']}")
    print(f"right: {sum(s['correct'] for s in shown)} of {len(shown)} samples\n")
    print(f"--- prompt ({shown[0]['n_prompt_tokens']} tokens)\n{_shortened(shown[0]['prompt'], options.full)}")
    for s in shown:
        verdict = "right" if s["correct"] else "wrong"
        answer = "no answer" if s["pred"] is None else f"answer {s['pred']!r}"
        print(f"\n--- sample {s['sample_idx']} (seed {s['seed']}): {verdict}")
        print(f"{answer}; {s['grade_reason']}; {s['n_tokens']} tokens, ended by {s['finish_reason']}")
        print(_shortened(s["completion"], options.full))


SHOW = Command(SHOW_HELP, _show_arguments, _show)


def _shortened(text: str, full: bool) -> str:
    if full or len(text) <= HEAD + TAIL:
        return text
    return f"{text[:HEAD]}\n[... {len(text) - HEAD - TAIL} characters left out; --full shows them ...]\n{text[-TAIL:]}"
