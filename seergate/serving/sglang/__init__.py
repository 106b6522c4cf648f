"""Block-sparse decoding inside SGLang, as a plugin: `--attention-backend seergate`.

SGLang calls `register` in each of its processes. It registers an attention backend, checks an engine's options before
any process starts, and adds statistics of decoding to the server's internal state. Options are given under "seergate"
in ``--json-model-override-args``. The backend extends SGLang's ``torch_native`` backend, which is for CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NAME = "seergate"


def register() -> None:
    """The entry point in ``sglang.srt.plugins``; may be called any number of times."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.server_args import add_attention_backend_choices

    if NAME in ATTENTION_BACKENDS:
        return
    # One of the last steps in which SGLang resolves its options, in the launching process. First, since it fails in a
    # release without this step, in which the backend must not be there without its checks.
    register_resolution_hook("handle_model_capability_adjustments")(_check)
    add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_make)
    controller = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
    HookRegistry.register(f"{controller}.get_internal_state", _add_statistics)


def _make(runner: Any) -> Any:
    from seergate.serving.sglang.backend import SparseBackend

    return SparseBackend(runner)


def _check(server_args: Any, previous: Callable[[Any], None]) -> None:
    from seergate.serving.sglang.checks import check_arguments

    previous(server_args)
    check_arguments(server_args)


def _add_statistics(answer: Any, controller: Any, *request: Any) -> None:
    backend = controller.scheduler.tp_worker.model_runner.attn_backend
    if hasattr(backend, "seergate_stats"):
        answer.internal_state[NAME] = backend.seergate_stats()
