"""Functions that `torch.compile` does not trace into."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def custom_op(schema: str, fake: Callable[..., Any], mutates: Iterable[str] = ()) -> Callable[[Function], Function]:
    """Decorate a function that reads tensor values or launches kernels: it becomes one node of a traced graph.

    An eager call runs the function directly, which saves the 10 microseconds of PyTorch's dispatch.

    Args:
        schema: name, arguments and results of the operator ``seergate::NAME``, in PyTorch's notation.
        fake: takes the same arguments; returns empty results of the right shapes and dtypes, reading no values.
        mutates: names of the arguments that are changed in place.
    """
    name, rest = schema.split("(", 1)

    def decorate(function: Function) -> Function:
        node = torch.library.custom_op(f"seergate::{name}", function, mutates_args=tuple(mutates), schema=f"({rest}")
        node.register_fake(fake)

        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            return (node if torch.compiler.is_compiling() else function)(*args, **options)

        return run  # type: ignore[return-value]

    return decorate
