"""Speculative decoding: which drafted tokens stay, and how many to draft (Leviathan et al. 2023; SparseSpec).

A drafter proposes tokens one by one, and the target model verifies them together. Emitted tokens follow the target's
distribution, whatever the drafter is; a bad drafter only costs time.

Shape suffixes: B batch, N drafted tokens, M = N + 1, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.8, 4.0
"""The assumed acceptance before any draft was verified, and the number of verified tokens that it counts as."""

MEMORY = 0.9
"""Weight of the tokens verified before, at each new verification: the last ten or so count."""

VERIFYING_COST = {"cpu": 0.2}
"""By kind of device, what each further token adds to the cost of a dense pass; nothing elsewhere. A GPU waits for
memory; a CPU core is kept busy by the arithmetic of a few tokens (`benchmarks/results/lossless.json`)."""

LONGEST_DRAFT = 16
PROBE_EVERY = 64
"""While drafting does not pay, it is tried again after this many tokens: acceptance and contexts change."""


def accept_greedy(drafted_BN: Tensor, targets_BM: Tensor) -> tuple[Tensor, Tensor]:
    """Accept drafted tokens up to the first that differs from the target's choice, ``targets_BM``, which goes one
    position further.

    Returns:
        Tokens ``[B, M]``, of which the first ``accepted + 1`` count, and how many drafted ones were accepted ``[B]``.
    """
    accepted_B = (drafted_BN == targets_BM[:, :-1]).long().cumprod(1).sum(1)
    return targets_BM, accepted_B


def accept_sampled(drafted_BN: Tensor, drafter_BNV: Tensor, target_BMV: Tensor) -> tuple[Tensor, Tensor]:
    """Accept drafted tokens with probability ``min(1, p / q)``; replace the first rejected one by a draw from the
    normalised ``max(0, p - q)``. The emitted tokens are draws from the target's p (``target_BMV``) if the drafted
    ones are draws from q (``drafter_BNV``). Returns the same as `accept_greedy`.
    """
    batch, length = drafted_BN.shape
    chosen = drafted_BN[..., None]
    q_BN = drafter_BNV.gather(-1, chosen)[..., 0]
    p_BN = target_BMV[:, :length].gather(-1, chosen)[..., 0]
    accepted_B = (torch.rand_like(q_BN) * q_BN < p_BN).long().cumprod(1).sum(1)
    rows = torch.arange(batch, device=drafted_BN.device)
    p_BV = target_BMV[rows, accepted_B]
    # Where all were accepted, q is zero and the draw is from p.
    q_BV = torch.cat((drafter_BNV, torch.zeros_like(target_BMV[:, :1])), 1)[rows, accepted_B]
    surplus_BV = (p_BV - q_BV).clamp(min=0)
    # p and q agree to the last bit only where nothing can be rejected; rounding must not make the draw impossible
    none_left = surplus_BV.sum(-1, keepdim=True) <= 0
    last_B1 = torch.multinomial(torch.where(none_left, p_BV, surplus_BV), 1)
    tokens_BM = torch.cat((drafted_BN, last_B1), 1).scatter(1, accepted_B[:, None], last_B1)
    return tokens_BM, accepted_B


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens that one cycle yields: ``length`` are drafted, each is accepted with this probability if those before it
    were, and the verification adds one.
    """
    return float(sum(acceptance**i for i in range(length + 1)))


def cycle_cost(length: int, dense_bytes: float, draft_bytes: float, per_token: float) -> float:
    """Cost of ``length`` drafting passes and the verification, in bytes read; arguments as of `expected_speedup`."""
    return length * draft_bytes + dense_bytes * (1 + per_token * length)


def expected_speedup(
    acceptance: float, length: int, dense_bytes: float, draft_bytes: float, per_token: float = 0.0
) -> float:
    """The cost of a token decoded densely, divided by its cost with drafts. Decoding is assumed to be bound by memory.

    Args:
        acceptance: probability that a drafted token is accepted.
        dense_bytes: weights, keys and values that a dense pass reads once, whether for one token or for several.
        draft_bytes: the same for a drafting pass.
        per_token: cost of each further token of a dense pass, as a share of its cost (`VERIFYING_COST`).
    """
    cost = cycle_cost(length, dense_bytes, draft_bytes, per_token)
    return expected_tokens(acceptance, length) * dense_bytes / cost


def best_length(
    acceptance: float, dense_bytes: float, draft_bytes: float, longest: int, per_token: float = 0.0
) -> int:
    """The draft length ``0..longest`` of the largest `expected_speedup`; the shortest of equals."""

    def gain(length: int) -> tuple[float, int]:
        return expected_speedup(acceptance, length, dense_bytes, draft_bytes, per_token), -length

    return max(range(longest + 1), key=gain)


class DraftLength:
    """Chooses how many tokens to draft, from the acceptance rate and the bytes that passes read.

    It uses counts of bytes and tokens only, never a clock, so that runs are reproducible. ``fixed`` is a length
    that is always taken, ``longest`` the most that is chosen without one, and ``per_token`` as of `expected_speedup`.
    """

    def __init__(self, fixed: int | None, longest: int, per_token: float = 0.0) -> None:
        self.per_token = per_token
        self.fixed, self.longest = fixed, min(longest, LONGEST_DRAFT) if fixed is None else fixed
        self._accepted, self._tried = PRIOR_ACCEPTANCE * PRIOR_WEIGHT, PRIOR_WEIGHT
        self._since_draft = 0

    @property
    def acceptance(self) -> float:
        """The probability, as estimated, that a drafted token is accepted if those before it were."""
        return self._accepted / self._tried

    def choose(self, dense_bytes: float, draft_bytes: float) -> int:
        """The length of the next draft; 0 where drafting does not pay."""
        if self.fixed is not None:
            return self.fixed
        length = best_length(self.acceptance, dense_bytes, draft_bytes, self.longest, self.per_token)
        if length == 0 and self._since_draft >= PROBE_EVERY:
            length = 1
        self._since_draft = 0 if length else self._since_draft + 1
        return length

    def verified(self, length: int, accepted: int) -> None:
        """Update the estimate with a draft of ``length`` tokens, the first ``accepted`` of which were accepted."""
        tried = min(length, accepted + 1)
        self._accepted = MEMORY * self._accepted + accepted
        self._tried = MEMORY * self._tried + tried
