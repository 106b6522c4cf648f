"""``seergate figure trained`` on natural text: methods trained for the language model of Python that ships."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from seergate.cli.models import load_gates, load_model, model_path

TEXT = "python-text"
MODULES, PROMPT, STEPS = 12, 384, 48
"""Held-out modules, spread evenly over all; tokens of each that are read at once, and that are scored."""
METHODS = ("dense", "oracle", "gate", "fast_kvzip:interval=16", "trim_kv:interval=16")
BUDGETS, SHARE = (32, 64, 128), 1 / 3
"""Token budgets; and the share of dense attention's bytes that methods are compared at."""

NOTE = (
    "The prompt is {prompt} tokens from the middle of each of {modules} modules of Python's standard library that the "
    "model was not trained on; of the tokens that follow, fed one by one, {steps} are scored. KL is to dense "
    "attention's distribution of the next token, in nats per token; beside it the paired difference from the first "
    "gate's at the same budget, or share of bytes, with its 95 % interval over modules. Bytes are in percent of dense "
    "attention's; a method that cannot read the same share has no row there."
)


def on_text(gates: Mapping[str, str], modules: int, out: Path) -> list[str]:
    """Sections of the figure's page, in Markdown; the plot and ``text.json``, all figures, go into ``out``.

    Args:
        gates: name -> adapter; the first that chooses blocks is what others are compared with.
        modules: how many held-out modules.
    """
    from seergate.eval.forced import SETTLING, Forced, pieces
    from seergate.eval.settings import grid, with_each
    from seergate.eval.store import write_json
    from seergate.hf.loading import load_tokenizer
    from seergate.python_text import modules as corpus
    from seergate.report.forced import forced_plot, forced_table

    path, banks = model_path(TEXT), {name: load_gates(source) for name, source in gates.items()}
    model, tokenizer = load_model(path, "float32"), load_tokenizer(path)
    length = PROMPT + SETTLING + STEPS + 1
    forced = Forced(model, banks, pieces(tokenizer, list(corpus(held_out=True).values()), length, modules), PROMPT)
    (step,) = {bank.config.block_size for bank in banks.values() if not bank.config.retention}
    specs = with_each(grid(list(METHODS), list(BUDGETS), step), banks)
    rows = list(forced.at_budgets(specs))
    equal = list(forced.at_bytes(specs, SHARE, step))
    write_json(out / "text.json", {"rows": [*rows, *equal]})
    plot = forced_plot(rows, out / "text.png")
    return [
        "## On natural text",
        f"![KL against bytes read]({plot.name})",
        NOTE.format(prompt=PROMPT, modules=len(forced.ids), steps=STEPS),
        forced_table(rows),
        f"### At equal bytes read, {SHARE:.0%} of dense attention's",
        forced_table([rows[0], *equal]),
    ]
