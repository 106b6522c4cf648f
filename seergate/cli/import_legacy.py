"""``seergate import-legacy``: `seergate export`, by the name that users of the published gates look for."""

from __future__ import annotations

from seergate.cli.export import add_arguments, run

__all__ = ["HELP", "add_arguments", "run"]

HELP = (
    "convert gates in the published SeerAttention-R format",
    "Read gates as the SeerAttention-R authors published them (config.json and attn_gate_weights.pth) and write them\n"
    "anew, as `seergate export` does. Not needed to use them: every command and seergate.load read both formats.\n"
    "Decoded as the published code does (compat='published') unless you say otherwise.",
    [
        "seergate import-legacy SeerAttention/SeerAttention-Decode-Qwen3-8B-AttnGates qwen3-8b-gates",
        "seergate import-legacy old-gates new-gates --base-model Qwen/Qwen3-4B",
    ],
)
