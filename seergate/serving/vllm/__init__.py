"""Block-sparse decoding inside vLLM, as a plugin: `vllm serve MODEL --additional-config '{"seergate": {...}}'`.

vLLM calls `register` in each of its processes. It wraps the creation of the engine's configuration: if
`additional_config` has the key "seergate", its value is checked and seergate's worker (`serving.vllm.worker`) is
selected, which vLLM then creates like any other worker. Nothing else in vLLM is replaced.
"""

from __future__ import annotations

import functools
from typing import Any


def register() -> None:
    """The entry point in ``vllm.general_plugins``; may be called any number of times."""
    from vllm.engine.arg_utils import EngineArgs

    from seergate.serving.common.settings import Settings

    plain = EngineArgs.create_engine_config
    if getattr(plain, "by_seergate", False):
        return

    @functools.wraps(plain)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings = Settings.read(self.additional_config)
        if settings is None:
            return plain(self, *args, **kwargs)
        from seergate.serving.vllm.checks import configured

        return configured(settings, self, functools.partial(plain, self, *args, **kwargs))

    create_engine_config.by_seergate = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config
