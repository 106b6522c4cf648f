"""Options of a run and its resolved configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from seergate.checks import check_choice, check_counts
from seergate.errors import SeergateError
from seergate.eval.collector import Progress
from seergate.eval.environment import environment, grader_version
from seergate.eval.generation.samples import Limit
from seergate.eval.generation.served import SERVERS, engine_version
from seergate.eval.grading.graders import check_grader
from seergate.eval.grading.judge import try_judge
from seergate.eval.grading.programs import PROGRAM, check_programs_run
from seergate.eval.sampling import Sampling
from seergate.eval.settings import MethodSpec
from seergate.eval.tasks.prompts import encode, end_ids, prompt_text
from seergate.eval.tasks.task import Problem, Task, contents_hash, digest_of
from seergate.fingerprint import fingerprint, rope_of
from seergate.methods import Dense
from seergate.models.families import usable_positions, why_no_longer
from seergate.models.gate_bank import GateBank
from seergate.options import option

ENGINES = ("transformers", *SERVERS)


@dataclass(frozen=True)
class RunOptions:
    """Options of a run; ``None`` takes the task's own value. ``metadata["help"]`` describes those of the command line.

    Attributes:
        max_new_tokens, max_total_tokens: if either limit is given, both replace the task's.
        sampling: the sampling; by default the task's, or else that of the model's generation configuration.
        batch_size: samples generated together; does not affect results. ``None`` estimates what fits into memory.
        measure_recall: see `seergate.eval.proxies`.
        model_name: name of the model in the records; a path or Hub id.
        engine: see `seergate.eval.generation.served`; it affects results.
        on_progress: called after every graded sample, one call at a time, from a grading thread.
    """

    samples: int | None = option(None, "answers per problem [the paper's; 1 of chain_sum]")
    max_new_tokens: int | None = option(None, "longest answer [what the task allows]")
    max_total_tokens: int | None = option(None, "the same with the prompt [32768 of Hub tasks]")
    sampling: Sampling | None = None
    seed: int = option(0, "sampling seed")
    batch_size: int | None = 16
    measure_recall: bool = option(
        False, "also the cheap proxies: recall of attention mass, next-token KL to dense, perplexity"
    )
    run_programs: bool = option(
        False, "allow that programs which the model writes run, confined, to be graded (humaneval)"
    )
    model_name: str = ""
    engine: str = option(ENGINES[0], "generation backend", choices=ENGINES)
    on_progress: Callable[[Progress], None] | None = None

    def samples_of(self, task: Task) -> int:
        """Answers per problem."""
        return task.samples if self.samples is None else self.samples

    def limit(self, task: Task) -> Limit:
        """Maximum length of an answer."""
        if self.max_new_tokens is None and self.max_total_tokens is None:
            return Limit(task.max_new_tokens, task.max_total_tokens)
        return Limit(self.max_new_tokens, self.max_total_tokens)

    def limit_of(self, task: Task, text: Any, longest: int) -> Limit:
        """`limit`, cut to what the model can hold if it is the task's own.

        Args:
            text: configuration of the language model.
            longest: tokens of the longest prompt.

        Raises:
            SeergateError: if a limit of these options lets prompt and answer exceed what the model can hold.
        """
        limit, room = self.limit(task), usable_positions(text)
        if room is None or longest + limit.of(longest) <= room:
            return limit
        if self.max_new_tokens is None and self.max_total_tokens is None:
            return Limit(limit.max_new_tokens, room)
        new = f"max_new_tokens to {room - longest} or " if room > longest else ""
        raise SeergateError(
            f"the answers may have {limit}, and the longest prompt has {longest:,}: {why_no_longer(text)}; set "
            f"{new}max_total_tokens to {room} at most, or leave the limits out"
        )

    def check(self, task: Task, sampling: Sampling | None = None) -> None:
        """Raise an error if these options do not fit the task; ``sampling`` is `resolved_sampling`, if known."""
        self.limit(task)
        check_counts(self, optional=True, samples=1, batch_size=1)
        check_choice(self, engine=ENGINES)
        if task.scored is None:
            check_grader(task.grader)
        if task.grader == "math":
            try_judge()
        if task.grader == PROGRAM:
            check_programs_run(self.run_programs)
        sampling, samples = sampling or self.sampling or task.sampling, self.samples_of(task)
        if sampling is not None and sampling.greedy and samples > 1:
            raise ValueError(
                f"samples is {samples}; with greedy decoding, which gives the same answer every time, it must be 1 "
                "(--samples 1); or give a --temperature above 0"
            )

    def check_reference(self, specs: Sequence[MethodSpec]) -> None:
        """Raise an error if proxies are to be measured without ``dense``, which comes first in a sweep."""
        if self.measure_recall and specs[0].name != Dense.name:
            raise SeergateError("measure_recall needs dense among the methods: proxies are measured on its answers")

    def resolved_sampling(self, task: Task, model: PreTrainedModel) -> Sampling:
        """The sampling to use: that of these options, else the task's, else the model's."""
        return self.sampling or task.sampling or Sampling.of_model(model)


def run_config(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    problems: list[Problem],
    spec: MethodSpec,
    bank: GateBank | None,
    options: RunOptions,
    processes: int,
    limit: Limit,
) -> dict[str, Any]:
    """The contents of `config.yaml`: everything that affects a run's results, and how it was run; plain YAML types."""
    served_on_gpu = options.engine in SERVERS and torch.cuda.is_available()  # the model here is on the CPU
    device = torch.device("cuda") if served_on_gpu else model.device
    gates = None
    if spec.has_gates and bank is not None:
        name = {"name": spec.gates} if spec.gates else {}
        gates = {**name, "path": bank.source, "fingerprint": fingerprint(bank)}
    return {
        "task": {
            "name": task.name,
            **task.options,
            "n_problems": len(problems),
            "grader": task.grader,
            "chance": task.chance,
            "contents": contents_hash(problems),
            "prompts": digest_of(encode(tokenizer, prompt_text(tokenizer, problem)) for problem in problems),
        },
        "method": spec.describe(bank),
        "model": {
            "path": options.model_name or str(model.config.name_or_path),
            "type": model.config.model_type,
            "parameters": sum(p.numel() for p in model.parameters()),
            "dtype": str(model.dtype).removeprefix("torch."),
            "fingerprint": fingerprint(model),
            "rope": rope_of(model),
        },
        "gates": gates,
        "generation": {
            "samples": options.samples_of(task),
            **asdict(limit),
            **asdict(options.resolved_sampling(task, model)),
            **({"stop": list(task.stop)} if task.stop else {}),
            "seed": options.seed,
            "ends": sorted(end_ids(model, tokenizer)),
            **({"engine": engine_version(options.engine)} if options.engine in SERVERS else {}),
        },
        "environment": environment(device) | grader_version(task.grader),
        "execution": {
            "threads": torch.get_num_threads(),
            "batch_size": options.batch_size or "auto",
            "processes": processes,
        },
    }
