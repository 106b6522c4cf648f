"""Which operators PyTorch runs."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operators(TorchDispatchMode):
    """Notes the operators that run in its ``with`` block.

    Attributes:
        names: all of them, views included.
        launches: those that PyTorch would launch on a GPU: neither views nor allocations.
        bytes: size of the largest tensor that is made.
    """

    def __init__(self, launches: list[str] | None = None) -> None:
        super().__init__()
        self.names: list[str] = []
        self.launches: list[str] = [] if launches is None else launches
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, name = function(*args, **(kwargs or {})), function._schema.name.removeprefix("aten::")
        given = {x.untyped_storage()._cdata for x in tree_leaves(args) if isinstance(x, Tensor)}
        new = [x for x in tree_leaves(made) if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given]
        self.names.append(name)
        self.bytes = max([self.bytes, *(x.nbytes for x in new)])
        if function._schema.is_mutable or (new and "empty" not in name):
            self.launches.append(name)
        return made
