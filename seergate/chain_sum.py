"""The public name of the chain-sum task, `seergate.eval.tasks.chain_sum`."""

from seergate.eval.tasks.chain_sum import *  # noqa: F403
