"""Embedded engines whose decode step keeps addresses, with a stand-in for CUDA graphs that runs on the CPU.

`record` does what capturing a CUDA graph does: it notes each operation of a function with the memory of its arguments
and of its result, and repeats the operations on that memory without the function. So a repeated step reads the weights
that lie where they lay while it was recorded. What it cannot show: which operations CUDA refuses to capture, but for
those that read a value, and how streams order them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from inflight.engines.embedded.decoding import CapturedDecodeStep, Compiler, DecodeStep, Recorded
from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.engine import Engine
from inflight.engines.embedded.slot_attention import ATTENTION_NAME, register_slot_attention
from inflight.model.checkpoints import load_causal_lm


def as_it_is(step: DecodeStep) -> DecodeStep:
    """Pad and keep addresses, and compile nothing."""
    return step


def recording(step: DecodeStep) -> DecodeStep:
    return CapturedDecodeStep(step, record)


def record(function: Callable[[], torch.Tensor]) -> Recorded:
    with _Recorder() as recorder:
        result = function()
    return recorder.repeat, result


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a step that is captured reads a value, for which a GPU would be waited for")
        result = func(*args, **(kwargs or {}))
        self._operations.append((func, *tree_map(_in_place, (args, kwargs or {}, result))))
        return result

    def repeat(self) -> None:
        for func, args, kwargs, result in self._operations:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _in_place(leaf: Any) -> Any:
    """Return a tensor that stays on the memory that this one has now."""
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def endpoint_of(
    path: Path, compiler: Compiler | None = recording, *, max_model_len: int = 1024, max_concurrent: int = 8
) -> EmbeddedEndpoint:
    """Return an endpoint on the CPU whose engine takes this compiler."""
    register_slot_attention()
    model: Any = load_causal_lm(path, attention=ATTENTION_NAME, dtype="float32")
    engine = Engine(
        model, max_model_len=max_model_len, max_concurrent=max_concurrent, eos_token_ids=[257], compiler=compiler
    )
    return EmbeddedEndpoint(engine, model, name=path.name)


def make(path: Path) -> EmbeddedEndpoint:
    """Return an endpoint with a recorded decode step, for the kit."""
    from inflight.engines.embedded.chat import ChatFormat
    from inflight.model.checkpoints import load_tokenizer

    register_slot_attention()
    model: Any = load_causal_lm(path, attention=ATTENTION_NAME)
    tokenizer: Any = load_tokenizer(path)
    engine = Engine(
        model,
        max_model_len=model.config.max_position_embeddings,
        max_concurrent=64,
        eos_token_ids=[model.config.eos_token_id],
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        compiler=recording,
    )
    return EmbeddedEndpoint(engine, model, name=path.name, chat=ChatFormat(tokenizer, engine.limits.max_model_len))
