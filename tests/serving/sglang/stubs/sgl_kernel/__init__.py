"""In place of SGLang's compiled kernels (sglang-kernel): every name is there, and every call is refused."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is compiled code, which is not installed")

    return absent
