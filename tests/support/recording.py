"""Records tokens, logits, selected blocks, losses and gradients of every method, storage and correction, as hashes.

A refactor is bit-identical: record before it, compare after it, on one machine.

    python -m tests.support.recording before.json
    python -m tests.support.recording after.json --against before.json
"""

import argparse
import hashlib
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import seergate
from seergate import GateBank, methods
from seergate.eval.tasks.chain_sum import make_problems
from tests.support.evictors import EVICTORS
from tests.support.models import gates, left_padded, prompt, tiny_model

TINY = "checkpoints/tiny-reasoner"
FAMILIES = ("qwen3", "qwen2", "llama", "gemma2", "gemma3_text", "gpt_oss", "phi3", "qwen3_5_text")
BLOCKS = {"token_budget": 64, "block_size": 8}
SELECTORS: dict[str, dict[str, Any]] = {
    "gate": {"token_budget": 64},
    "oracle": BLOCKS,
    "quest": BLOCKS | {"dense_layers": ()},
    "random": BLOCKS,
    "resa": BLOCKS,
    "dense": {},
}
RULES: dict[str, dict[str, Any]] = {
    "threshold": {"threshold": 4e-3},
    "top_p": {"top_p": 0.9},
    "sinks": {"token_budget": 64, "sink_blocks": 2, "dense_layers": (0,)},
}


@dataclass
class Case:
    """One `generate` under a method.

    Attributes:
        how: passed to `attach`.
        generate: passed to `generate`.
        traced: also record logits and blocks; off where steps have fixed shapes, or tokens are drafted.
    """

    name: str
    model: Any
    inputs: dict[str, torch.Tensor]
    method: Any
    how: dict[str, Any] = field(default_factory=dict)
    generate: dict[str, Any] = field(default_factory=dict)
    traced: bool = True
    new: int = 40

    def record(self) -> dict[str, Any]:
        """Hashes of what came out."""
        import pyarrow.parquet as pq

        hashes: dict[str, Any] = {}
        with tempfile.TemporaryDirectory() as folder, seergate.attached(self.model, self.method, **self.how) as handle:
            if not self.traced:
                self._run(hashes)
                return hashes
            path = Path(folder) / "trace.parquet"
            with handle.traced(path):
                self._run(hashes, output_logits=True)
            # Columns that a later trace adds are not among them: recordings stay comparable.
            columns = ["step", "layer", "row", "head", "position", "tokens", "blocks"]
            rows = pq.read_table(path, columns=columns).to_pylist()
            return hashes | {"blocks": hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]}

    def _run(self, hashes: dict[str, Any], **shown: Any) -> None:
        torch.manual_seed(1)
        out = self.model.generate(
            **self.inputs, max_new_tokens=self.new, return_dict_in_generate=True, **shown, **self.generate
        )
        hashes["tokens"] = digest(out.sequences)
        if shown:
            hashes["logits"] = digest(torch.stack(out.logits))


@dataclass
class DistillCase:
    """One distillation loss and the gradients of the gates."""

    name: str
    model: Any
    bank: GateBank
    ids: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """The loss, and a hash of the gradients."""
        self.bank.requires_grad_(True)
        loss = self.bank.distill_loss(self.model, input_ids=self.ids, **self.options)
        loss.backward()
        grads = [digest(p.grad) for _, p in sorted(self.bank.named_parameters()) if p.grad is not None]
        return {"loss": loss.item().hex(), "gradients": hashlib.sha256(json.dumps(grads).encode()).hexdigest()[:16]}


def digest(tensor: torch.Tensor) -> str:
    """A hash of dtype, shape and every bit."""
    tensor = tensor.detach().cpu().contiguous()
    data = tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + data).hexdigest()[:16]


def on_the_reasoner() -> Iterator[Case | DistillCase]:
    """Every method, storage and correction on the shipped model."""
    model = AutoModelForCausalLM.from_pretrained(TINY)
    model.generation_config.do_sample = False
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    bank = GateBank.from_pretrained(f"{TINY}/gates")
    texts = [
        tokenizer.apply_chat_template(problem.messages[:1], tokenize=False, add_generation_prompt=True)
        for problem in (next(make_problems(1, variables=n, seed=n)) for n in (6, 20, 13))
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    one = dict(tokenizer(texts[1], return_tensors="pt", return_token_type_ids=False))

    def case(name: str, method: str, options: dict[str, Any], **more: Any) -> Case:
        made = methods.make_method(method, bank=bank if methods.has_gates(method) else None, **options)
        return Case(f"reasoner {name}", model, more.pop("inputs", dict(batch)), made, **more)

    for name, options in SELECTORS.items():
        yield case(f"{name} growing", name, options)
        if name != "resa":
            static = {"cache_implementation": "static"}
            yield case(f"{name} static", name, options, inputs=one, generate=static, traced=False)
            yield case(f"{name} paged", name, options, how={"storage": seergate.Paging(block_size=16)})
        if name not in ("resa", "dense"):
            yield case(f"{name} offloaded", name, options, how={"storage": seergate.Offload(3_000_000)})
            yield case(f"{name} rectify", name, options, how={"correction": seergate.Rectify(8)}, traced=False)
    for rule, options in RULES.items():
        yield case(f"gate {rule}", "gate", options)
    gate = SELECTORS["gate"]
    yield case("gate sampled", "gate", gate, generate={"do_sample": True, "temperature": 0.7})
    yield case("gate assisted", "gate", gate, inputs=one, generate={"prompt_lookup_num_tokens": 3}, traced=False)
    for name, evictor in EVICTORS.items():
        yield Case(f"reasoner {name}", model, dict(batch), evictor.method(model), new=60, traced=name != "kv4bit")
    ids = tokenizer("".join(texts), return_tensors="pt").input_ids
    for start in (0.0, 0.5):
        learning = GateBank.from_pretrained(f"{TINY}/gates")
        yield DistillCase(f"reasoner distill from {start}", model, learning, ids, {"row_start": start})


def on_random_models() -> Iterator[Case | DistillCase]:
    """One method of each kind on several families."""
    inputs = left_padded([prompt(37, 1), prompt(60, 2), prompt(5, 3)])
    ids = torch.cat([prompt(70, 4), prompt(9, 5)], 1)
    pack = {"cu_seqlens": torch.tensor([0, 70, 79], dtype=torch.int32)}
    for family in FAMILIES:
        model = tiny_model(family)
        torch.manual_seed(5)
        bank, learning = gates(model), gates(model)
        gate = methods.Gate(bank=bank, token_budget=24)
        quest = methods.Quest(token_budget=24, block_size=8, dense_layers=())
        for method in (gate, quest, EVICTORS["h2o"].method(model)):
            yield Case(f"{family} {method.name}", model, inputs, method, new=24)
        yield DistillCase(f"{family} distill", model, learning, ids, pack)


def main() -> None:
    """Record, and compare if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", type=Path, help="an earlier recording, to compare with")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    recordings: dict[str, Any] = {}
    for case in (*on_the_reasoner(), *on_random_models()):
        try:
            recordings[case.name] = case.record()
        except Exception as error:  # what is refused is recorded as refused, and compared as such
            recordings[case.name] = {"error": f"{type(error).__name__}: {error}"}
        print(case.name, recordings[case.name], flush=True)
    arguments.out.write_text(json.dumps({"torch": torch.__version__, "cases": recordings}, indent=1) + "\n")
    if arguments.against:
        before = json.loads(arguments.against.read_text())["cases"]
        differ = [name for name in before if recordings.get(name) != before[name]]
        for name in differ:
            print(f"DIFFERS {name}: {before[name]} -> {recordings.get(name)}")
        print(f"{len(before) - len(differ)} of {len(before)} recordings are the same to the last bit")
        sys.exit(bool(differ))


if __name__ == "__main__":
    main()
