"""The installed torchvision, whose compiled part needs CUDA: two of its operators are declared, without a kernel."""

import pathlib
import sysconfig

import torch

_operators = torch.library.Library("torchvision", "DEF")
_operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_installed = pathlib.Path(sysconfig.get_paths()["purelib"]) / "torchvision"
__path__ = [str(_installed)]
__file__ = str(_installed / "__init__.py")
exec(compile((_installed / "__init__.py").read_text(), __file__, "exec"))
