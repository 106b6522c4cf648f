"""Two properties of large models that so small a one does not get by itself, and look-ups: what pretraining rewards.

Gates, and all that selects blocks, rely on both: names keep apart when the keys of a block are pooled, and a decision
rests on few tokens. The third reward, for look-ups that find what they look for, makes training short.

Shape suffixes: B batch, S tokens, H query heads, K KV heads, D head dimension, N keys (or names, after averaging).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedTokenizerFast, Qwen3ForCausalLM

from seergate.eval.tasks.chain_sum import NAMES, ROLES

LOOKUP_LAYER = 1
"""The layer whose first KV head does the look-ups."""

NOISE_FLOOR = 0.01
"""Less than this share of the keys' variance inside a name is not rewarded any more."""


def effective_rank(vectors_ND: Tensor) -> Tensor:
    """Participation ratio ``tr(C)^2 / tr(C^2)`` of the covariance ``C``: how many dimensions are in use."""
    centred_ND = vectors_ND - vectors_ND.mean(0)
    covariance_DD = centred_ND.T @ centred_ND
    return covariance_DD.trace().square() / covariance_DD.square().sum()


class Places:
    """Where a batch has what is looked up by a name, and from where it is looked up.

    Four things are: what a definition says first, its second operand, which variable comes next, and the value of a
    variable that has been computed.

    Attributes:
        role_ids: per role of a name (`ROLES`), its tokens.
        ids_BS: the batch, set by `watch`.
    """

    ids_BS: Tensor

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.role_ids = [tokenizer.convert_tokens_to_ids([role.format(n) for n in range(NAMES)]) for role in ROLES]
        self.number_of = torch.full((len(ROLES), len(tokenizer)), -1)
        for row, ids in zip(self.number_of, self.role_ids, strict=True):
            row[ids] = torch.arange(NAMES)
        self.plus, self.next, self.think = tokenizer.convert_tokens_to_ids(["plus", "next", "<think>"])

    def watch(self, ids_BS: Tensor) -> None:
        """Say which tokens the next forward will see."""
        self.ids_BS = ids_BS

    def answers(self) -> list[tuple[Tensor, Tensor]]:
        """Per thing: the names it is found by ``[B, S]`` (-1: none here), and how far behind each it stands."""
        defined, valued = self.number_of[0][self.ids_BS], self.number_of[3][self.ids_BS]
        sums = (self.ids_BS.roll(-6, 1) == self.plus) & (defined >= 0)
        one = torch.ones_like(self.ids_BS)
        return [
            (defined, 5 * one),
            (defined.where(sums, -1), 7 * one),
            (defined, torch.where(sums, 12, 10)),
            (valued, one),
        ]

    def lookups(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Per thing, the ``N`` look-ups of the reasoning: rows, columns that ask, and columns that answer."""
        _, operand, target, valued = (numbers[self.ids_BS] for numbers in self.number_of)
        reasoning = (self.ids_BS == self.think).cumsum(1) > 0
        asking = [
            target,
            target.roll(3, 1).where(self.ids_BS == self.plus, -1),
            valued.roll(4, 1).where(self.ids_BS == self.next, -1),
            operand,
        ]
        triples = []
        for (names_BS, distance_BS), by_BS in zip(self.answers(), asking, strict=True):
            row, column = torch.nonzero(names_BS >= 0, as_tuple=True)
            column_of = torch.full((len(self.ids_BS), NAMES), -1)
            column_of[row, names_BS[row, column]] = column + distance_BS[row, column]
            row, column = torch.nonzero((by_BS >= 0) & reasoning, as_tuple=True)
            triples.append((row, column, column_of[row, by_BS[row, column]]))
        return triples


class KeySpread:
    """How well the keys by which names are found tell the names apart.

    Left to itself the model codes all names in about six of a head's dimensions: enough for attention, too few for
    anything that looks at blocks. For each thing that is looked up, the effective rank of the names' mean keys is
    rewarded, and the share of the keys' variance that is not due to the name is penalised. The rank of the names'
    embeddings in each role is rewarded too, because keys are made of them.
    """

    def __init__(self, model: Qwen3ForCausalLM, places: Places) -> None:
        self.places = places
        self.embedding = model.get_input_embeddings().weight
        self.ranks: list[Tensor] = []
        self.noises: list[Tensor] = []
        model.model.layers[LOOKUP_LAYER].self_attn.k_norm.register_forward_hook(self._measure)

    def reward(self) -> Tensor:
        """Log of the rank, less log of the noise, of the last forward."""
        embedded = [effective_rank(self.embedding[ids]).log() for ids in self.places.role_ids]
        ranks = torch.stack(self.ranks).log().mean() + torch.stack(embedded).mean()
        return ranks / 2 - torch.stack(self.noises).clamp_min(NOISE_FLOOR).mean().log()

    @property
    def rank(self) -> float:
        """Geometric mean over the places of the effective rank of the names' keys."""
        return torch.stack(self.ranks).log().mean().exp().item()

    @property
    def noise(self) -> float:
        """Mean share of the keys' variance that is not due to the name."""
        return torch.stack(self.noises).mean().item()

    def _measure(self, module: torch.nn.Module, inputs: object, keys_BSKD: Tensor) -> None:
        self.ranks, self.noises = [], []
        for names_BS, distance_BS in self.places.answers():
            row, column = torch.nonzero(names_BS >= 0, as_tuple=True)
            keys_ND = keys_BSKD[row, column + distance_BS[row, column], 0].float()
            names_N = names_BS[row, column]
            count_N = torch.bincount(names_N, minlength=NAMES)
            sums_ND = keys_ND.new_zeros(NAMES, keys_ND.shape[1]).index_add(0, names_N, keys_ND)
            count_N, sums_ND = count_N[count_N > 0], sums_ND[count_N > 0]
            means_ND = sums_ND / count_N[:, None]
            self.ranks.append(effective_rank(means_ND))
            centre_D = keys_ND.mean(0)
            between = ((means_ND - centre_D).square().sum(1) * count_N).sum()
            self.noises.append(1 - between / (keys_ND - centre_D).square().sum())


class AttentionFocus:
    """Over how many tokens a head spreads itself, and whether look-ups find what they look for.

    Large models attend to few tokens, and to the first ones when there is nothing to find. This one, left to itself,
    spreads what it does not need over everything, and some decisions come to lean on that, which nothing that reads
    only a part of the context can serve. The entropy of randomly drawn rows is penalised.

    The look-ups are taught. Left to itself the model is content for long to copy from any definition.
    """

    ROWS = 96

    def __init__(self, model: Qwen3ForCausalLM, places: Places) -> None:
        self.places = places
        self.entropies: list[Tensor] = []
        self.misses: list[Tensor] = []
        AttentionInterface.register("focus", self._attend)
        model.set_attn_implementation("focus")

    def entropy(self) -> Tensor:
        """Mean over heads and layers of the last forward, in nats."""
        entropies, self.entropies = self.entropies, []
        return torch.stack(entropies).mean()

    def missed(self) -> Tensor:
        """Cross-entropy, in nats, of the attention that looks things up in the last forward; mean of the things."""
        misses, self.misses = self.misses, []
        return torch.stack(misses).mean()

    def _measure_misses(self, query_BHSD: Tensor, key_BSD: Tensor, scaling: float) -> None:
        """The query heads of one KV head: how much of their attention misses what is looked up."""
        positions = torch.arange(key_BSD.shape[1])
        for row, asks, answers in self.places.lookups():
            queries_NHD = query_BHSD[row, :, asks].float()
            scores_NHS = (
                torch.cat([queries_NHD[row == b] @ keys.T for b, keys in enumerate(key_BSD.float())]) * scaling
            )
            scores_NHS = scores_NHS.masked_fill(positions > asks[:, None, None], -1e9)
            self.misses.append(
                F.cross_entropy(scores_NHS.transpose(1, 2), answers[:, None].expand(scores_NHS.shape[:2]))
            )

    def _attend(
        self,
        module: torch.nn.Module,
        query_BHSD: Tensor,
        key_BKSD: Tensor,
        value_BKSD: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        **options: object,
    ) -> tuple[Tensor, None]:
        length, group = query_BHSD.shape[2], query_BHSD.shape[1] // key_BKSD.shape[1]
        key_BHSD, value_BHSD = key_BKSD.repeat_interleave(group, 1), value_BKSD.repeat_interleave(group, 1)
        if module.layer_idx == LOOKUP_LAYER:
            with torch.autocast("cpu", enabled=False):
                self._measure_misses(query_BHSD[:, :group], key_BKSD[:, 0], scaling)
        rows = torch.randint(length, (min(self.ROWS, length),))
        scores = (query_BHSD[:, :, rows] @ key_BHSD.transpose(-1, -2)).float() * scaling
        logs = scores.masked_fill(torch.arange(length) > rows[:, None], -1e9).log_softmax(-1)
        self.entropies.append(-(logs.exp() * logs).sum(-1).mean())
        out_BHSD = F.scaled_dot_product_attention(query_BHSD, key_BHSD, value_BHSD, is_causal=True, scale=scaling)
        return out_BHSD.transpose(1, 2), None
