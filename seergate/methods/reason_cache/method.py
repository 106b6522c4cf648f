"""ReasonCache: similar reasoning blocks of a request share one physical block (Chen et al., arXiv 2507.21433).

There is no public implementation. docs/reason_cache.md lists what the paper leaves open and what was chosen. This
module holds the method and its options; the module `evaluator` decides, `seergate.cache.sharing` applies.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, field
from typing import Any

from seergate.checks import check, check_counts, check_flags, is_int, is_number
from seergate.errors import SeergateError, how_to_install
from seergate.methods.base import LayerSpec, LayerState, Method
from seergate.methods.controls import Dense
from seergate.methods.evicting import CompressingMethod
from seergate.methods.reason_cache.steps import BLANK_LINE
from seergate.methods.selecting import page_tokens


@dataclass(kw_only=True)
class ReasonCache(Method):
    """Replace a full block of a reasoning step by a block of an earlier, similar step of the same request.

    No token is evicted: attention reads as many tokens as before, from fewer physical blocks. Steps are compared
    between forward passes, and blocks are shared by changing entries of the block table.

    Attributes:
        reads: the method that selects the blocks to read (`Gate`, `Quest`, ...); ``None`` reads everything.
        block_size: tokens per block, a multiple of the reading method's; ``None`` takes that method's, or 16.
        max_blocks: maximum number of blocks of a cache, all rows together; ``None`` for no limit.
        strict, soft: upper and lower end of the adaptive threshold on the similarity of steps.
        structural_check: whether formulas and code of two steps must be equal.
        percentile: percentile of the row's distances so far up to which blocks are shared; at 0 none is.
        warm_up: number of distances that are collected before anything is shared.
        max_candidates: maximum number of similar earlier steps whose blocks are compared, the most similar first.
        border: regular expression that ends a step.
        include_prompt: whether the prompt (the tokens before the first decoded one) has steps too.
        tokenizer: turns token ids into text; ``None`` loads the model's own.

    Raises:
        SeergateError: if ``reads`` evicts or is a `ReasonCache`, or if a library of the structural check is missing.
        ValueError: for an option out of range.
    """

    name = "reason_cache"
    plot_style = ("#DDCC77", "8")
    shares_blocks = True
    kv_backend = "seergate.cache.paging:paging_of"
    reads: Method | None = None
    block_size: int | None = None
    max_blocks: int | None = None
    strict: float = 0.9
    soft: float = 0.7
    structural_check: bool = True
    percentile: float = 80.0
    warm_up: int = 16
    max_candidates: int = 4
    border: str = BLANK_LINE
    include_prompt: bool = False
    tokenizer: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_counts(self, warm_up=0, max_candidates=1)
        check_counts(self, optional=True, block_size=1, max_blocks=1)
        check_flags(self, "structural_check", "include_prompt")
        for name, most in (("strict", 1.0), ("soft", self.strict), ("percentile", 100.0)):
            value = getattr(self, name)
            check(name, value, is_number(value) and 0 <= value <= most, f"in 0..{most:g}")
        try:
            re.compile(self.border)
        except (re.error, TypeError) as error:
            raise ValueError(f"border is {self.border!r}, which is no regular expression: {error}") from None
        if (found := re.search(self.border, "a")) and not found[0]:
            raise ValueError(f"border is {self.border!r}, which matches empty text, so every token would end a step")
        if self.reads is not None and not isinstance(self.reads, Method):
            raise ValueError(f"reads is {self.reads!r}; it must be a method that keeps all blocks, such as Gate(...)")
        if self.tokenizer is not None and not hasattr(self.tokenizer, "decode"):
            raise ValueError(f"tokenizer is {self.tokenizer!r}; it must have a decode method")
        if isinstance(self.reads, (CompressingMethod, ReasonCache)):
            raise SeergateError(
                f"{self.name!r} cannot be read with {self.reads.name!r}: the method must keep all blocks, as gate, "
                "quest and dense do"
            )
        if self.structural_check and importlib.util.find_spec("pylatexenc") is None:
            raise SeergateError(
                f"the structural check of reason_cache needs pylatexenc; {how_to_install('reason')}, or leave the "
                "check out (structural_check=False)"
            )

    @property
    def read_method(self) -> Method:
        return Dense() if self.reads is None else self.reads

    @property
    def nominal(self) -> str:
        return self.read_method.nominal

    def describe(self) -> dict[str, Any]:
        """Options by name, with the page size, and the reading method's options as ``gate.NAME``."""
        read = {} if self.reads is None else self.reads.describe()
        own = super().describe() | {"block_size": page_tokens(self.read_method, self.block_size)}
        return own | {f"gate.{key}": value for key, value in read.items()}

    def new_state(self, spec: LayerSpec) -> LayerState:
        """A fresh state of the reading method; sharing needs none per layer."""
        return self.read_method.new_state(spec)


@dataclass(kw_only=True)
class RandomSharing(ReasonCache):
    """The control of the paper's Table I: share as many blocks as `ReasonCache`, at the same times, but random ones.

    Each decision is replaced by one about two random full blocks of the reasoning, so that the saving is equal. Blocks
    of the prompt are drawn only with ``include_prompt``.

    Attributes:
        seed: seed of the random choice.
    """

    name = "random_sharing"
    plot_style = ("#BBBBBB", "2")
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check("seed", self.seed, is_int(self.seed), "an integer")
