"""``seergate generate``: answers one prompt, and shows which blocks each token was written from."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seergate.checks import check, check_count, check_counts
from seergate.cli.arguments import decoding_args, eval_args, model_args
from seergate.durable import check_writable
from seergate.errors import SeergateError
from seergate.escaping import Terminal
from seergate.models.names import bank_for, is_tiny, load_model, model_path, say_gates
from seergate.progress import notes

if TYPE_CHECKING:
    from seergate.eval.tasks.task import Problem

HELP = (
    "answer one prompt, and see which blocks each token was written from",
    "Write the answer to one prompt while it is decoded. With --trace, also a page that shows, for each token of the\n"
    "answer, which blocks every layer and KV head read, with their text, and the method's scores beside the true\n"
    "attention. The page is one HTML file that needs no network.",
    [
        "seergate generate --trace read.html",
        "seergate generate --method quest --trace quest.html",
        "seergate generate --model Qwen3-8B --gates org/Qwen3-8B-gates --prompt-file question.txt --trace read.html",
    ],
)
TAKES_METHODS = True
TINY_BUDGET, REAL_BUDGET = 128, 4096
LONG_PROMPT = 1000
"""A message is printed before the prefill of a prompt with more tokens than this."""
OVERRIDES = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
    "use_cache": True,
    "cache_implementation": "dynamic",
}
"""Options of ``generate`` that hold whatever the model's configuration says: one answer, with a cache."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    model_args(parser)
    decoding_args(parser, "gate", f" [{REAL_BUDGET}; tiny: {TINY_BUDGET}]")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the user's turn [tiny model: a sample problem]")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="file with the user's turn")
    parser.add_argument("--max-new-tokens", type=int, default=1024, metavar="N", help="maximum length [%(default)s]")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="HTML page of the blocks read, such as read.html")
    eval_args(parser, "threads", "dtype", "device")


def run(options: argparse.Namespace) -> None:
    """Check the options, answer the prompt, and write the page of the trace."""
    import torch
    from transformers import TextStreamer

    from seergate.eval.report import write_explorer
    from seergate.eval.run_plan import check_model
    from seergate.eval.settings import method_spec
    from seergate.eval.tasks.prompts import encode, end_ids, prompt_text
    from seergate.methods import SelectingMethod
    from seergate.models.attach import attached
    from seergate.models.families import check_positions, model_positions
    from seergate.pretrained import load_tokenizer

    _check(options)
    tiny = is_tiny(options.model)
    spec = method_spec(options.method, options.budget, default_budget=TINY_BUDGET if tiny else REAL_BUDGET)
    path = model_path(options.model)
    bank = bank_for(options.model, options.gates) if spec.has_gates else None
    method = spec.method(bank)
    if options.trace is not None and not isinstance(method.read_method, SelectingMethod):
        raise SeergateError(
            f"--trace shows the blocks that are read, and {spec.name!r} selects none; it takes methods such as gate, "
            "quest and oracle, which reads what dense attention looks at"
        )
    config = check_model(path, [method], [] if bank is None else [bank])
    tokenizer = load_tokenizer(path)
    problem = _problem(options, tiny, bool(tokenizer.chat_template))
    ids = encode(tokenizer, prompt_text(tokenizer, problem, today=True))
    text = config.get_text_config()
    check_positions(text, len(ids), "the prompt")
    longest = min(options.max_new_tokens, max(1, (model_positions(text) or sys.maxsize) - len(ids)))
    if longest < options.max_new_tokens:
        print(f"at most {longest:,} new tokens: the model has {model_positions(text):,} positions", file=sys.stderr)

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model = load_model(path, options.dtype, options.device)
    if len(ids) > LONG_PROMPT:
        print(f"reading the prompt of {len(ids):,} tokens", file=sys.stderr)
    sampling: dict[str, Any] = {}
    if options.temperature is not None:
        sampling = {"do_sample": options.temperature > 0, "temperature": options.temperature or None}
    torch.manual_seed(options.seed)
    if problem.gold:
        print(problem.messages[-1]["content"] + "\n", file=Terminal(sys.stderr))
    if bank is not None:
        print(say_gates(options.model, options.gates), file=Terminal(sys.stderr))
    with (
        notes(lambda line: print(line, file=sys.stderr)),
        tempfile.TemporaryDirectory() as folder,
        attached(model, method, correction=spec.correction) as handle,
    ):
        trace = Path(folder) / "trace.parquet"
        began = time.monotonic()
        with contextlib.nullcontext() if options.trace is None else handle.traced(trace, attention=True):
            output = model.generate(
                torch.tensor([ids], device=model.device),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=model.device),
                max_new_tokens=longest,
                eos_token_id=sorted(end_ids(model, tokenizer)) or None,
                streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
                tokenizer=tokenizer,  # for stop strings
                **OVERRIDES | sampling,
            )[0].tolist()
        seconds, stats = time.monotonic() - began, handle.stats()
        summary = f"{len(output) - len(ids)} tokens in {seconds:.1f} s"
        if stats["density"] is not None:
            summary += f"; a step read {100 * stats['density']:.0f} % of the tokens before it"
        if problem.gold:
            summary += f"; the right answer is {problem.gold}"
        print(summary, file=Terminal(sys.stderr))
        if options.trace is not None and len(output) <= len(ids) + 1:
            print(f"no page was written to {options.trace}: the only token comes from the prompt", file=sys.stderr)
        elif options.trace is not None:
            page = write_explorer(trace, tokenizer, output, options.trace).path
            print(f"what was read: {page} ({page.stat().st_size / 1e6:.1f} MB)", file=sys.stderr)


def _check(options: argparse.Namespace) -> None:
    """Refuse values out of range, and a page that cannot be written."""
    check_counts(options, max_new_tokens=1)
    check_counts(options, optional=True, threads=1)
    check_count("seed", options.seed, 0, 2**63 - 1)
    finite = 0 <= (options.temperature or 0) < float("inf")
    check("temperature", options.temperature, finite, "0 (greedy) or a positive number")
    if options.trace is None:
        return
    if options.max_new_tokens < 2:
        raise ValueError("max_new_tokens is 1; the first token comes from the prompt, and --trace shows later ones")
    if options.trace.is_dir() or options.trace.suffix.lower() not in (".html", ".htm"):
        raise SeergateError(f"--trace is {options.trace}; it must name a file that ends in .html, such as read.html")
    check_writable(options.trace.parent)


def _problem(options: argparse.Namespace, tiny: bool, chats: bool) -> Problem:
    """The prompt as a problem: a user's turn, or plain text for a model without a chat template."""
    from seergate.eval import make_task
    from seergate.eval.tasks.task import Problem

    text = options.prompt
    if options.prompt_file is not None:
        try:
            text = options.prompt_file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise SeergateError(f"the prompt {options.prompt_file} cannot be read: {error}") from error
    if text is None and not tiny:
        raise SeergateError("there is no prompt; give --prompt TEXT or --prompt-file FILE")
    if text is None:
        return make_task("chain_sum", problems=1, variables=16).problems()[0]
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SeergateError(f"the prompt is not UTF-8 text: {error}") from error
    if not text.strip():
        raise SeergateError("the prompt is empty; there is nothing to answer")
    return Problem("prompt", "", messages=({"role": "user", "content": text},)) if chats else Problem("", "", (), text)
