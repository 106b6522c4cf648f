"""``seergate traces``: a model's own answers, to train its gates on."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

from seergate.cli.arguments import decoding_args, eval_args, given, model_args
from seergate.distill.config import load_train_config
from seergate.durable import check_writable, lock
from seergate.errors import SeergateError
from seergate.eval.store import append_line, differences, write_yaml
from seergate.json_file import read_json_text
from seergate.models.names import check_file_served, gates_for, load_model, model_path, say_gates
from seergate.yaml_file import read_yaml

HELP = (
    "a model's own answers, as data for seergate train",
    "Let a model answer the questions of a dataset, and write its answers as rows for `seergate train --data`. With\n"
    "--method gate they are decoded sparsely, so that gates learn from contexts that follow from their selections.\n"
    "The same command continues after an interruption; FILE.yaml records its settings. Answers that are cut at the\n"
    "limit are left out unless --keep-cut is given.",
    [
        "seergate traces --model tiny-reasoner --prompts chain_sum --limit 100 --out traces.jsonl",
        "seergate traces --model Qwen3-8B --prompts open-r1/OpenR1-Math-220k --engine vllm --out own.jsonl",
        "seergate traces --prompts questions.jsonl --method gate --gates DIR --budget 64 --out own.jsonl",
    ],
)
TAKES_METHODS = True

_BEGINNING = '{"row": '

LOADED = ("weights", "rope")
"""Fields of the record that are known only once the model is loaded."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    model_args(parser)
    parser.add_argument(
        "--prompts",
        metavar="DATA",
        required=True,
        help="one source, as for `seergate train --data`; the prompt is all of a row before the last "
        "answer: messages, a prompt or a question",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", required=True, help="the rows, such as traces.jsonl")
    parser.add_argument("--limit", type=int, metavar="N", help="use the first N rows [all]")
    decoding_args(parser, "dense", "")
    parser.add_argument(
        "--max-length", type=int, metavar="N", help="tokens of question and answer [as in `seergate train`]"
    )
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="tokens of an answer [rest of --max-length]")
    parser.add_argument("--keep-cut", action="store_true", help="keep answers that are cut at the limit")
    eval_args(parser, "batch_size", "engine", "dtype", "device")


def run(options: argparse.Namespace) -> None:
    """Check the options, load the model, and write its answers."""
    with ExitStack() as stack:
        _answer(options, stack)


def _answer(options: argparse.Namespace, stack: ExitStack) -> None:
    """Do the work of `run`; ``stack`` keeps the file of the rows open."""
    from seergate.distill.base_model import within_positions
    from seergate.distill.commits import data_commit
    from seergate.distill.data import questions
    from seergate.distill.formatting import OPEN, answer_turn
    from seergate.eval import Limit, Problem, Sampling
    from seergate.eval.generation.engine import Engine
    from seergate.eval.generation.samples import Generation, Job, Request
    from seergate.eval.generation.served import SERVERS, check_served, engine_version, generate_by_server
    from seergate.eval.run_plan import check_model
    from seergate.eval.sampling import sample_seed
    from seergate.eval.settings import method_spec
    from seergate.eval.tasks.prompts import encode, prompt_text
    from seergate.fingerprint import fingerprint, rope_of
    from seergate.models.attach import attached
    from seergate.models.families import check_length
    from seergate.models.gate_bank import GateBank
    from seergate.pretrained import load_tokenizer

    spec = method_spec(options.method, options.budget)
    served = options.engine in SERVERS
    engine = engine_version(options.engine) if served else options.engine
    data = {"data": options.prompts, "data_limit": options.limit, **given(options, "max_length")}
    ((config, _), *others) = load_train_config(options.model, data).sources
    if others:
        raise SeergateError(f"--prompts is {options.prompts!r}; it must be one source")
    path = model_path(options.model)
    if served:
        check_file_served(path, options.engine)
    gates = gates_for(options.model, options.gates) if spec.has_gates else None
    bank = None if gates is None else GateBank.from_pretrained(gates)
    if served:
        check_served(options.engine, spec, bank)
    method = spec.method(bank)
    shape = check_model(path, [method], [] if bank is None else [bank])
    if options.max_length is not None:
        check_length(shape.get_text_config(), options.max_length, "a text of --max-length")
    config = within_positions(config, shape)
    tokenizer, limit = load_tokenizer(path), Limit(options.max_new_tokens, config.max_length)
    file = stack.enter_context(_locked(options.out))
    answered = _rows(options.out, file)
    record: dict[str, Any] = {
        "model": config.model,
        "dtype": options.dtype,
        "engine": engine,
        "gates": None if bank is None else {"source": gates, "weights": fingerprint(bank)},
        "method": spec.describe(bank),
        "max_length": config.max_length,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "seed": options.seed,
        "prompts": config.data,
        "revision": config.data_revision,
    }
    record["commit"] = recorded_commit(options.out, record, unknown=LOADED) if answered else data_commit(config)
    conversations, unusable = questions(replace(config, data_revision=record["commit"] or config.data_revision))
    if any(row in conversations and turns[:-1] != conversations[row] for row, turns in answered.items()):
        raise SeergateError(f"{options.out} has answers to other questions than {config.data} asks; name another file")
    prompts = {
        row: prompt_text(tokenizer, Problem(str(row), "", messages=tuple(turns)))
        for row, turns in conversations.items()
        if row not in answered
    }
    encoded = [
        Request(row, text, tuple(encode(tokenizer, text)), sample_seed(options.seed, str(row), 0))
        for row, text in prompts.items()
    ]
    fitting = [request for request in encoded if len(request.ids) < config.max_length]
    requests = sorted(fitting, key=lambda request: -len(request.ids))
    notes = [
        f"{count:,} {what}"
        for what, count in (*unusable.items(), ("too long to be answered", len(prompts) - len(fitting)))
        if count
    ]
    if not answered and not requests:
        raise SeergateError(
            f"--prompts is {options.prompts!r}, in which no row is usable ({', '.join(notes) or 'no rows'}); it "
            f"must have rows with messages, a prompt or a question, of fewer tokens than --max-length "
            f"({config.max_length:,})"
        )
    if bank is not None:
        print(say_gates(options.model, options.gates))
    print(f"{len(requests):,} questions, {len(answered):,} answered already" + "".join(f"; {n}" for n in notes))
    model = load_model(path, options.dtype, options.device, options.engine)
    record |= {"weights": fingerprint(model), "rope": rope_of(model)}
    if answered:
        recorded_commit(options.out, record)
    else:
        write_yaml(record_path(options.out), record)
    cut = 0
    if requests:
        chosen = Sampling.of_model(model) if options.temperature is None else Sampling(options.temperature)
        job = Job(spec, options.batch_size, requests[0].ids, config.max_length, limit, chosen)

        def take(done: Generation) -> None:
            nonlocal cut
            if done.finish_reason != "stop":
                cut += 1
                if not options.keep_cut:
                    return
            _, tag, rest = done.request.prompt.rpartition(OPEN)
            opened = "" if rest.strip() else tag + rest  # without it, an answer that is cut would not be reasoning
            turns = [*conversations[done.request.key], answer_turn(opened + done.completion)]
            append_line(file, {"row": done.request.key, "messages": turns})

        if served:
            generate_by_server(options.engine, model, tokenizer, requests, job, bank, take)
        else:
            with attached(model, method, correction=spec.correction) as handle:
                Engine(handle, tokenizer, job, take).run(requests)
    written = len(answered) + len(requests) - (0 if options.keep_cut else cut)
    cut_answers = "kept" if options.keep_cut else "left out (--keep-cut keeps them)"
    print(f"{written:,} answers in {options.out}" + (f"; {cut:,} were cut ({limit}) and {cut_answers}" if cut else ""))


@contextmanager
def _locked(path: Path) -> Iterator[FileIO]:
    """Open the file of the rows to append to it, locked against other processes. An error leaves no empty file."""
    check_writable(path.parent)
    record, empty = record_path(path), not path.exists() or not path.stat().st_size
    if empty and record.exists() and not _is_record(record):
        raise SeergateError(f"{record} would be replaced by the settings of {path}; name another file")
    with path.open("ab+", buffering=0) as file:
        lock(file, path, "name another file")
        try:
            yield file
        except BaseException:
            if not path.stat().st_size:
                path.unlink()
                record.unlink(missing_ok=True)
            raise


def _is_record(path: Path) -> bool:
    """Whether a file was written by this command."""
    try:
        return read_yaml(path).keys() >= {"prompts", "method"}
    except SeergateError:
        return False


def record_path(path: Path) -> Path:
    """Path of the file that records how the rows were generated."""
    return path.with_name(f"{path.name}.yaml")


def recorded_commit(path: Path, now: dict[str, Any], unknown: tuple[str, ...] = ()) -> str | None:
    """Refuse to append rows generated with other settings than the existing rows. ``now`` is the record of the new
    rows; its ``unknown`` fields are not compared. Returns the prompts' commit; ``None`` if they are not on the Hub.
    """
    record = read_yaml(record_path(path))
    if different := differences(record, now, ("commit", *unknown)):
        raise SeergateError(f"{path} was made with other settings: {different}; use the same, or another --out")
    return record.get("commit")


def _rows(path: Path, file: FileIO) -> dict[int, list[dict[str, str]]]:
    """Row number -> question and answer, from ``path``, which is open as ``file``. An incomplete last line of a killed
    process is removed.
    """
    try:
        whole, _, rest = path.read_bytes().decode().rpartition("\n")  # with the line ends that it has
        lines: list[Any] = [read_json_text(line) for line in whole.split("\n") if line]
        rows = {int(line["row"]): line["messages"] for line in lines}
        if not _BEGINNING.startswith(rest[: len(_BEGINNING)]):
            raise ValueError
    except (KeyError, TypeError, ValueError) as error:
        raise SeergateError(f"--out is {path}, which is not a file of traces; name another file") from error
    if rest:
        file.truncate(len(f"{whole}\n".encode()) if whole else 0)
    return rows
