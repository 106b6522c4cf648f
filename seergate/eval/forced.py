"""How near methods come to dense attention on given texts, whose tokens they are fed one by one.

Nothing is generated, so errors do not build up, and a model that can only continue text will do. Each text's beginning
is its prompt; the next `SETTLING` tokens do not count, as until then some methods have dropped nothing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from seergate.eval.costs import RowStats
from seergate.eval.engine import Batch
from seergate.eval.matching import FAR, distinct, knob_of, nearest, turned
from seergate.eval.proxies import compare
from seergate.eval.settings import MethodSpec
from seergate.eval.stats import mean_and_error, t95
from seergate.hf.attach import attached
from seergate.hf.bank import GateBank
from seergate.methods import Dense, LongPromptWarning

SETTLING = 16


def pieces(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], length: int, most: int | None = None) -> Tensor:
    """``[N, length]``: tokens from the middle of each text that is long enough; of ``most`` of them, spread evenly."""
    encoded = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
    starts = [(ids, (len(ids) - length) // 2) for ids in encoded if len(ids) >= length]
    if most is not None and most < len(starts):
        starts = [starts[i] for i in torch.linspace(0, len(starts) - 1, most).long().tolist()]
    return torch.tensor([ids[start : start + length] for ids, start in starts])


class Forced:
    """What settings are compared by, on the same texts for all of them; each is measured once.

    Args:
        model: in eval mode, nothing attached.
        banks: name -> gates, for the settings that have some.
        ids: ``[N, S]``, one text per row.
        prompt: how many tokens of each are read at once.
    """

    def __init__(self, model: PreTrainedModel, banks: Mapping[str, GateBank], ids: Tensor, prompt: int) -> None:
        self.model, self.banks, self.ids, self.prompt = model, banks, ids.to(model.device), prompt
        first = prompt + SETTLING
        with torch.inference_mode():
            each = [model(input_ids=row[None, :-1], use_cache=False).logits[0, first:] for row in self.ids]
        self.dense, self.known = torch.stack(each), dict[str, tuple[Tensor, dict[str, float]]]()
        self.steps = self.dense.shape[1]

    @torch.inference_mode()
    def __call__(self, spec: MethodSpec) -> tuple[Tensor, dict[str, float]]:
        """``[N, 4]``, means over each text of what `compare` sums; and bytes, means over texts and steps."""
        key = repr(spec)
        if key not in self.known:
            method = spec.method(spec.bank(self.banks))
            with warnings.catch_warnings(), attached(self.model, method) as handle:
                warnings.simplefilter("ignore", LongPromptWarning)  # that budgets bind the prompt is meant
                batch = Batch(self.model)
                batch.add(self.ids[:, : self.prompt].tolist())
                settling, scored = self.ids[:, self.prompt : -1].T.split((SETTLING, self.steps))
                for tokens in settling.tolist():
                    batch.step(tokens)
                stats = handle.count_with(RowStats)
                stats.add_rows(len(self.ids))
                logits = torch.stack([batch.step(tokens) for tokens in scored.tolist()], dim=1)
                rows = [stats.of(row) for row in range(len(self.ids))]
            pairs = zip(self.dense, logits, self.ids[:, -self.steps :], strict=True)
            sums = torch.stack([compare(*pair) for pair in pairs])
            names = ("bytes_read_per_step", "own_bytes_mean")
            found = {name: sum(row[name] for row in rows) / len(rows) for name in names}
            self.known[key] = sums / self.steps, found
        return self.known[key]

    def row(self, spec: MethodSpec, gate: MethodSpec | None) -> dict[str, Any]:
        """The figures of a setting; and its difference from the gate's, with its 95 % interval over texts."""
        scores, found = self(spec)
        kl, loss, _, agreement = (mean_and_error(values) for values in scores.T.tolist())
        row: dict[str, Any] = {
            "method": spec.title,
            "budget": spec.token_budget,
            "kl": kl.mean,
            "kl_se": kl.se,
            "perplexity": math.exp(loss.mean),
            "agreement": agreement.mean,
            "agreement_se": agreement.se,
            **found,
        }
        if gate is not None and spec != gate:
            apart = mean_and_error((scores[:, 0] - self(gate)[0][:, 0]).tolist())
            half = t95(apart.n - 1) * apart.se
            row |= {"kl_minus_gate": apart.mean, "kl_minus_gate_95": [apart.mean - half, apart.mean + half]}
        return row

    def at_budgets(self, specs: Sequence[MethodSpec]) -> Iterator[dict[str, Any]]:
        """A row for every setting, compared with the first of the gates at the same budget."""
        gates = dict[int | None, MethodSpec]()
        for spec in specs:
            if spec.name == "gate":
                gates.setdefault(spec.token_budget, spec)
        for spec in specs:
            yield {"part": "budget", **self.row(spec, gates.get(spec.token_budget))}

    def at_bytes(self, specs: Sequence[MethodSpec], share: float, step: int) -> Iterator[dict[str, Any]]:
        """Every method with a token budget at which it reads so much of what dense attention reads, compared with the
        first of the gates, if that has a row. Budgets go up from the smallest of ``specs`` in steps of ``step``
        tokens; methods that cannot come within 10 % have no row.
        """
        (dense,) = (spec for spec in specs if spec.name == Dense.name)
        values = range(min(spec.token_budget for spec in specs if spec.token_budget), self.ids.shape[1], step)
        target, gate = share * self._read(dense), None
        free = sorted(filter(knob_of, distinct(specs)), key=lambda spec: spec.name != "gate")
        for spec in free:

            def read(value: int, spec: MethodSpec = spec) -> float:
                return self._read(turned(spec, "token_budget", value))

            found = turned(spec, "token_budget", nearest(values, read, target))
            if abs(self._read(found) - target) <= FAR * target:
                if spec is free[0] and spec.name == "gate":
                    gate = found
                yield {"part": "bytes", "share": share, **self.row(found, gate)}

    def _read(self, spec: MethodSpec) -> float:
        """Bytes per step, mean over texts."""
        return self(spec)[1]["bytes_read_per_step"]
