"""The stages of a pipeline: autograd functions send hidden states from stage to stage.

`forward` and `backward` thus stay separate calls, as the worker contract requires. A stage sends each row before it
computes the next one, so stages compute different rows at the same time. Autograd runs the backward passes of the rows
in reverse order, which is the same on every stage (GPipe, arXiv:1811.06965).

Shape suffixes: R tokens of a row, H hidden, N targets of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from inflight.losses.second_derivatives import without_graph
from inflight_fsdp.rows import Row


class Pipeline:
    """One stage of a pipeline; the ranks of ``group`` are its stages, in order."""

    def __init__(self, group: dist.ProcessGroup, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """``dtype`` is the dtype of hidden states; all ranks communicate from ``device``."""
        self.group = group
        self.stage, self.num_stages = group.rank(), group.size()
        self.hidden_size, self.dtype, self.device = hidden_size, dtype, device
        self._sent: list[tuple[Any, torch.Tensor]] = []
        """The pending sends, and the tensors that they read."""

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def logprobs(
        self, rows: Sequence[Row], compute: Callable[[Row, torch.Tensor | None], torch.Tensor]
    ) -> torch.Tensor:
        """Return the logprobs [N] of the rows' targets on every stage; the last stage computes them. Collective.

        ``compute`` receives a row and the hidden states [1, R, H] of the previous stage (None on the first stage). It
        returns this stage's hidden states, or logprobs on the last stage.
        """
        outputs = []
        for row in rows:
            anchor = torch.zeros((), device=self.device, requires_grad=True)
            hidden = None if self.is_first else _Receive.apply(anchor, self, len(row.token_ids_R))  # type: ignore[no-untyped-call]
            output = compute(row, hidden)
            outputs.append(output if self.is_last else _Send.apply(output, self))  # type: ignore[no-untyped-call]
        shape = (sum(len(row.places_N) for row in rows), *rows[0].targets.token_ids_N.shape[1:])
        joined = torch.cat(outputs) if self.is_last else torch.stack(outputs)
        logprobs_N: torch.Tensor = _FromLast.apply(joined, self, shape)  # type: ignore[no-untyped-call]
        return logprobs_N

    def send(self, x: torch.Tensor, stage: int) -> None:
        """Send a tensor to another stage, without waiting for that stage."""
        self._sent = [(call, memory) for call, memory in self._sent if not call.is_completed()]
        memory = x.detach().contiguous()
        self._sent.append((dist.isend(memory, group=self.group, group_dst=stage), memory))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, stage: int) -> torch.Tensor:
        """Return a tensor that another stage sent."""
        received = torch.empty(*shape, dtype=dtype, device=self.device)
        dist.recv(received, group=self.group, group_src=stage)
        return received


class _Send(torch.autograd.Function):
    """Sends hidden states to the next stage, and returns a zero whose backward pass receives their gradient."""

    @staticmethod
    def forward(ctx: Any, hidden_1RH: torch.Tensor, pipeline: Pipeline) -> torch.Tensor:
        ctx.pipeline, ctx.shape, ctx.dtype = pipeline, hidden_1RH.shape, hidden_1RH.dtype
        pipeline.send(hidden_1RH, pipeline.stage + 1)
        return torch.zeros((), device=hidden_1RH.device)

    @staticmethod
    @without_graph
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.pipeline.receive(ctx.shape, ctx.dtype, ctx.pipeline.stage + 1), None


class _Receive(torch.autograd.Function):
    """Receives the hidden states of the previous stage; the backward pass sends their gradient back to it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, pipeline: Pipeline, num_tokens: int) -> torch.Tensor:
        ctx.pipeline = pipeline
        return pipeline.receive((1, num_tokens, pipeline.hidden_size), pipeline.dtype, pipeline.stage - 1)

    @staticmethod
    @without_graph
    def backward(ctx: Any, gradient_1RH: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.pipeline.send(gradient_1RH, ctx.pipeline.stage - 1)
        return torch.zeros((), device=gradient_1RH.device), None, None


class _FromLast(torch.autograd.Function):
    """Sends logprobs from the last stage to all stages.

    All stages compute the same loss from them, but only the last stage uses the gradient.
    """

    @staticmethod
    def forward(ctx: Any, joined: torch.Tensor, pipeline: Pipeline, shape: tuple[int, ...]) -> torch.Tensor:
        ctx.is_last, ctx.num_joined = pipeline.is_last, len(joined)
        logprobs_N = joined.clone() if pipeline.is_last else torch.empty(shape, device=pipeline.device)
        dist.broadcast(logprobs_N, group=pipeline.group, group_src=pipeline.num_stages - 1)
        return logprobs_N

    @staticmethod
    @without_graph
    def backward(ctx: Any, gradient_N: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient_N if ctx.is_last else gradient_N.new_zeros(ctx.num_joined), None, None
