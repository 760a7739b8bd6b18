"""The losses of other frameworks as functions of tensors: the installed releases themselves, called on CPU.

TRL and PyTorch are where the tests run; Liger and verl lie apart, see `tests.losses.anchors.packages`.
"""
