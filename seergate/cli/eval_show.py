"""``seergate eval show``: what was asked, what was answered, and why it was graded as it was."""

from __future__ import annotations

import argparse
from pathlib import Path

from seergate.errors import SeergateError

HELP = (
    "a problem's answers in a run, with the reason for each grade",
    "Print what was asked, what every sample answered, and why it was graded as it was.",
    [
        "seergate eval show runs/eval-tiny-reasoner-chain_sum/gate-128 40-0-3",
        "seergate eval show RUN PROBLEM --sample 2 --full",
    ],
)
HEAD, TAIL = 400, 1200
"""Characters of a completion that are shown unless all are asked for; the answer is at the end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="one run directory (it holds samples.jsonl)")
    parser.add_argument("problem", metavar="PROBLEM", help="the problem's id")
    parser.add_argument("--sample", type=int, metavar="N", help="only this sample [all]")
    parser.add_argument("--full", action="store_true", help="whole completions instead of their ends")


def run(options: argparse.Namespace) -> int:
    """Print it."""
    from seergate.eval import store

    if not (options.run_dir / store.CONFIG).is_file():
        runs = ", ".join(path.name for path in store.run_directories(options.run_dir))
        raise SeergateError(f"{options.run_dir} holds several runs; name one of them: {runs}")
    config = store.read_config(options.run_dir)
    samples = store.read_samples(options.run_dir)
    if samples and "completion" not in samples[0]:
        raise SeergateError(f"{options.run_dir} holds texts that were scored, and no answers; see its report")
    found = [s for s in samples if str(s["problem_id"]) == options.problem]
    if not found:
        ids = sorted({str(s["problem_id"]) for s in samples})
        some = ", ".join(ids[:5]) + (", ..." if len(ids) > 5 else "")
        raise SeergateError(
            f"{options.run_dir} has no sample of a problem {options.problem!r}; it has {some or 'none'}"
        )
    if options.sample is not None:
        found = [s for s in found if s["sample_idx"] == options.sample]
        if not found:
            raise SeergateError(f"problem {options.problem!r} has no sample {options.sample} in {options.run_dir}")
    found.sort(key=lambda s: s["sample_idx"])
    right = sum(s["correct"] for s in found)
    print(f"task {config['task']['name']}, problem {options.problem}, grader {config['task']['grader']}")
    print(f"gold answer: {found[0]['gold']}")
    print(f"right: {right} of {len(found)} samples\n")
    print(f"--- prompt ({found[0]['n_prompt_tokens']} tokens)\n{_shortened(found[0]['prompt'], options.full)}")
    for s in found:
        verdict = "right" if s["correct"] else "wrong"
        answer = "no answer" if s["pred"] is None else f"answer {s['pred']!r}"
        print(f"\n--- sample {s['sample_idx']} (seed {s['seed']}): {verdict}")
        print(f"{answer}; {s['grade_reason']}; {s['n_tokens']} tokens, ended by {s['finish_reason']}")
        print(_shortened(s["completion"], options.full))
    return 0


def _shortened(text: str, full: bool) -> str:
    if full or len(text) <= HEAD + TAIL:
        return text
    return f"{text[:HEAD]}\n[... {len(text) - HEAD - TAIL} characters left out; --full shows them ...]\n{text[-TAIL:]}"
