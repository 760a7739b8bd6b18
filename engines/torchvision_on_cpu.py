"""Lets torchvision be imported without CUDA: its operators exist before it looks for its CUDA library.

A .pth file imports this at every start of the interpreter, so that it loads nothing before torchvision is asked for.
"""

import sys
from importlib.abc import MetaPathFinder

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_kept = []


class _BeforeTorchvision(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                library.define(name + _SCHEMA)
            _kept.append(library)  # an operator lives as long as its library


sys.meta_path.insert(0, _BeforeTorchvision())
