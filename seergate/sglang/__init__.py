"""Block-sparse decoding inside SGLang, as a plugin: `--attention-backend seergate`.

SGLang loads `register` in each of its processes. It offers one more attention backend; nothing of SGLang is replaced.
The options stand under "seergate" in ``--json-model-override-args``. SGLang's ``torch_native`` backend is extended,
the one for CPUs.
"""

from __future__ import annotations

from typing import Any

NAME = "seergate"


def register() -> None:
    """The entry point in ``sglang.srt.plugins``; may be called any number of times."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    if NAME in ATTENTION_BACKENDS:
        return
    add_attention_backend_choices([NAME])

    @register_attention_backend(NAME)
    def make(runner: Any) -> Any:
        from seergate.sglang.backend import SparseBackend

        return SparseBackend(runner)
