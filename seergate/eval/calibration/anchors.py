"""Finds the layers that choose blocks for the layers above them (`DecodeConfig.anchors`) by measuring on texts.

The model reads each text once, densely. At sampled tokens, each layer selects blocks as in a decode step, and the
recall of its attention is measured with its own selection and with that of each lower layer. Dynamic programming then
finds the anchors with the highest mean recall.

Shape suffixes: see `seergate.methods.base`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from seergate.checks import check_count
from seergate.config import nearest_anchor
from seergate.decode.step import block_probabilities, recall_of
from seergate.errors import SeergateError
from seergate.inference_mode import outside_inference_mode
from seergate.methods.base import Step
from seergate.methods.selecting import SelectingMethod, SelectingState
from seergate.models import families
from seergate.models.hooks import layer_spec
from seergate.models.packed_forward import TeacherCall, intercepted_attention
from seergate.models.resolving import check_dense_layers


@dataclass(frozen=True)
class SharedRecall:
    """Recall of each layer's attention with the block selections of other layers.

    Attributes:
        layers: the layers in ascending order: full-attention layers that are not dense, from the first that selects.
        recall: float64 ``[L, L]``: entry (a, l) is the share of layer l's attention on the blocks that layer a
            selected, mean over rows and heads; minus infinity if layer a cannot select for layer l.
        rows: number of tokens at which the layers selected.
    """

    layers: tuple[int, ...]
    recall: Tensor
    rows: int

    def anchors(self, count: int) -> tuple[int, ...]:
        """Return the anchors with the highest mean recall.

        Args:
            count: number of anchors, 1 to the number of layers; the lowest layer is always one of them.

        Raises:
            SeergateError: if ``count`` anchors cannot select for all layers.
        """
        check_count("count", count, 1, len(self.layers))
        table = self.recall.tolist()
        size = len(table)
        served = [[0.0] * a + list(accumulate(row[a:], initial=0.0)) for a, row in enumerate(table)]
        # best[n][end]: the highest sum over the layers before `end` with n anchors, and minus the last anchor
        best = [{0: (0.0, 0)}]
        for _ in range(count):
            sums = best[-1]
            best.append(
                {
                    end: max((sums[a][0] + served[a][end], -a) for a in sums if a < end)
                    for end in range(1, size + 1)
                    if any(a < end for a in sums)
                }
            )
        if best[count][size][0] == -torch.inf:
            raise SeergateError(
                f"count is {count}; so few anchors cannot select for all of the layers {list(self.layers)}, some of "
                "which have no gate or another number of KV heads"
            )
        chosen, end = list[int](), size
        for number in range(count, 0, -1):
            end = -int(best[number][end][1])
            chosen.append(self.layers[end])
        return tuple(reversed(chosen))

    def mean(self, anchors: Sequence[int]) -> float:
        """Return the mean recall of the layers if each reads the selection of the nearest anchor at or below it."""
        places = [self.layers.index(anchor) for anchor in anchors]
        own = [nearest_anchor(place, places) for place in range(len(self.layers))]
        return float(self.recall[own, range(len(own))].mean())


@outside_inference_mode
@torch.no_grad()
def shared_recall(
    model: PreTrainedModel, method: SelectingMethod, texts: Iterable[Tensor], rows: int = 64
) -> SharedRecall:
    """Measure the recall of each layer's attention with the selections of the layers below it.

    Args:
        model: a model in eval mode with no method attached.
        method: the method that selects blocks; its own anchors are ignored.
        texts: token ids ``[S]`` of each text; texts so short that the method reads every token are skipped.
        rows: number of tokens of each text at which layers select, evenly spaced over those that do not read all.

    Raises:
        SeergateError: if the method does not fit the model, or no text is long enough.
    """
    method = replace(method, anchors=())
    check_dense_layers(method, families.text_config(model).num_hidden_layers)
    if (bank := getattr(method, "bank", None)) is not None:
        families.check_gates(model, bank)
    heads = families.kv_heads(model)
    specs = {layer: layer_spec(model, layer, attention) for layer, attention in families.full_attention_modules(model)}
    read_all = max(method.covered_tokens, method.dense_below)
    chooses = [layer for layer in specs if method.selects_in(layer)]
    layers = [layer for layer in specs if layer >= chooses[0] and layer not in method.dense_layers]
    place = {layer: i for i, layer in enumerate(layers)}
    sums, counted, longest = torch.zeros(len(layers), len(layers), dtype=torch.float64), 0, 0
    chosen: dict[int, Any] = {}
    at = torch.empty(0, dtype=torch.int64)

    def attend(call: TeacherCall) -> Tensor:
        if call.layer in place:
            text, steps = _steps(call, at)
            if call.layer in chooses:
                state = method.new_state(specs[call.layer])
                assert isinstance(state, SelectingState)
                state.append(text)
                state.select_rows(torch.zeros(len(at), dtype=torch.int64))
                chosen[call.layer] = method.select(state, steps)
            blocks_BKGN = block_probabilities(steps, method.block_size)
            for anchor, selection in chosen.items():
                if heads[anchor] == heads[call.layer]:
                    recall = recall_of(blocks_BKGN, selection).double().sum()
                    sums[place[anchor], place[call.layer]] += recall.cpu()
        tokens = call.query_BHSD.shape[2]
        return call.attention(torch.tensor([0, tokens], dtype=torch.int32, device=call.query_BHSD.device)).output[None]

    for ids in texts:
        longest, first = max(longest, len(ids)), read_all + 1
        if len(ids) < first:
            continue
        at = torch.linspace(first, len(ids), min(rows, len(ids) - first + 1), device=model.device).long()
        chosen.clear()
        positions = torch.arange(len(ids), device=model.device)[None]
        with intercepted_attention(model, specs, attend):
            given = ids.to(model.device, torch.int64)[None]
            families.decoder_of(model)(input_ids=given, position_ids=positions, use_cache=False)
        counted += len(at)
    if not counted:
        raise SeergateError(
            f"the longest text has {longest} tokens, and {method.name} ({method.nominal}) reads all of rows of up to "
            f"{read_all}; give longer texts, or a smaller budget"
        )
    possible = torch.tensor([[a <= b and a in chooses and heads[a] == heads[b] for b in layers] for a in layers])
    return SharedRecall(tuple(layers), torch.where(possible, sums / counted, -torch.inf), counted)


def _steps(call: TeacherCall, lengths_R: Tensor) -> tuple[Step, Step]:
    """Return a prefill step of a layer's whole text, and decode steps of the last token of each prefix length."""
    q_pre, k_pre, last_R = call.q_pre_BHSD, call.k_pre_BKSD, lengths_R - 1
    assert q_pre is not None and k_pre is not None
    rows, tokens = len(lengths_R), call.query_BHSD.shape[2]
    keys, values = call.key_BKSD, call.value_BKSD
    common: dict[str, Any] = {"sm_scale": call.sm_scale, "sinks": call.sinks, "softcap": call.softcap}

    def each(x_1HSD: Tensor) -> Tensor:
        return x_1HSD[0, :, last_R].transpose(0, 1)[:, :, None]

    text = Step(
        *(q_pre.to(keys.dtype), k_pre.to(keys.dtype), call.query_BHSD, keys, [0], [tokens], keys, values),
        torch.tensor([tokens], device=keys.device),
        **common,
    )
    steps = Step(
        *(each(text.q_pre_BHSD), each(text.k_pre_BKSD), each(call.query_BHSD), each(keys)),
        *(last_R.tolist(), [1] * rows, keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1)),
        lengths_R,
        **common,
    )
    return text, steps
