"""Speculative decoding: acceptance of drafted tokens, and the draft length (Leviathan et al. 2023; SparseSpec).

A drafter proposes tokens one by one, and the target model verifies them together. Emitted tokens follow the target's
distribution, whatever the drafter is; a bad drafter only costs time.

Shape suffixes: B batch, N drafted tokens, M = N + 1, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.8, 4.0
"""The assumed acceptance rate before any verification, and the number of verified tokens that it weighs as."""

MEMORY = 0.9
"""Factor on the previous counts at each verification: about the last ten verifications count."""

VERIFYING_COST = {"cpu": 0.2}
"""Share of a dense pass's cost that each further token adds, by device type; 0 for other types. A GPU is bound by
memory; a CPU core is kept busy by the arithmetic of a few tokens (`benchmarks/results/lossless.json`)."""

LONGEST_DRAFT = 16
PROBE_EVERY = 64
"""While drafting does not pay, one token is drafted after this many tokens: acceptance and contexts change."""


def accept_greedy(drafted_BN: Tensor, targets_BM: Tensor) -> tuple[Tensor, Tensor]:
    """Accept drafted tokens up to the first that differs from the target's greedy choice, ``targets_BM``, which has
    one position more.

    Returns:
        Tokens ``[B, M]``, of which the first ``accepted + 1`` are valid; and the number of accepted drafts ``[B]``.
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
    """Expected tokens of one cycle: ``length`` drafted ones, each accepted with probability ``acceptance`` if its
    predecessors were, and one from the verification.
    """
    return float(sum(acceptance**i for i in range(length + 1)))


def cycle_cost(length: int, dense_bytes: float, draft_bytes: float, per_token: float) -> float:
    """Cost of ``length`` drafting passes and the verification, in bytes read; arguments as in `expected_speedup`."""
    return length * draft_bytes + dense_bytes * (1 + per_token * length)


def expected_speedup(
    acceptance: float, length: int, dense_bytes: float, draft_bytes: float, per_token: float = 0.0
) -> float:
    """Cost per token of dense decoding over that of decoding with drafts. Decoding is assumed to be memory-bound.

    Args:
        acceptance: probability that a drafted token is accepted.
        dense_bytes: weights, keys and values that a dense pass reads, whether for one token or for several.
        draft_bytes: the same for a drafting pass.
        per_token: cost of each further token of a dense pass, as a share of its cost (`VERIFYING_COST`).
    """
    cost = cycle_cost(length, dense_bytes, draft_bytes, per_token)
    return expected_tokens(acceptance, length) * dense_bytes / cost


def best_length(
    acceptance: float, dense_bytes: float, draft_bytes: float, longest: int, per_token: float = 0.0
) -> int:
    """The draft length ``0..longest`` with the largest `expected_speedup`; the shortest if several are equal."""

    def gain(length: int) -> tuple[float, int]:
        return expected_speedup(acceptance, length, dense_bytes, draft_bytes, per_token), -length

    return max(range(longest + 1), key=gain)


class DraftLength:
    """Chooses how many tokens to draft, from the acceptance rate and the bytes that passes read.

    It uses counts of bytes and tokens only, never a clock, so that runs are reproducible. ``fixed`` is a length that
    is always taken, ``longest`` the maximum without one, and ``per_token`` as in `expected_speedup`.
    """

    def __init__(self, fixed: int | None, longest: int, per_token: float = 0.0) -> None:
        self.per_token = per_token
        self.fixed, self.longest = fixed, min(longest, LONGEST_DRAFT) if fixed is None else fixed
        self._accepted, self._tried = PRIOR_ACCEPTANCE * PRIOR_WEIGHT, PRIOR_WEIGHT
        self._since_draft = 0

    @property
    def acceptance(self) -> float:
        """Estimated probability that a drafted token is accepted if its predecessors were."""
        return self._accepted / self._tried

    def choose(self, dense_bytes: float, draft_bytes: float) -> int:
        """Return the length of the next draft; 0 if drafting does not pay."""
        if self.fixed is not None:
            return self.fixed
        length = best_length(self.acceptance, dense_bytes, draft_bytes, self.longest, self.per_token)
        if length == 0 and self._since_draft >= PROBE_EVERY:
            length = 1
        self._since_draft = 0 if length else self._since_draft + 1
        return length

    def verified(self, length: int, accepted: int) -> None:
        """Update the estimate with a draft of ``length`` tokens, of which the first ``accepted`` were accepted."""
        tried = min(length, accepted + 1)
        self._accepted = MEMORY * self._accepted + accepted
        self._tried = MEMORY * self._tried + tried
