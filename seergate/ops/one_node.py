"""`one_node`: wrap a function as an opaque custom op."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def one_node(schema: str, fake: Callable[..., Any], mutates: Iterable[str] = ()) -> Callable[[Function], Function]:
    """Decorate a function that reads values or launches kernels: in a traced graph it is one node.

    An eager call runs the function itself, which saves the 10 microseconds that PyTorch's dispatch takes.

    Args:
        schema: the operator ``seergate::...``, its arguments and results, in PyTorch's notation.
        fake: same arguments; results of the right shapes and dtypes, without looking at any value.
        mutates: names of the arguments that are changed in place.
    """
    name, rest = schema.split("(", 1)

    def decorate(function: Function) -> Function:
        node = torch.library.custom_op(f"seergate::{name}", function, mutates_args=tuple(mutates), schema=f"({rest}")
        node.register_fake(fake)

        @functools.wraps(function)
        def run(*args: Any) -> Any:
            return (node if torch.compiler.is_compiling() else function)(*args)

        return run  # type: ignore[return-value]

    return decorate
