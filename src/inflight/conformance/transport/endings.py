"""How calls may end whose other end fails."""

from __future__ import annotations

from typing import Any

import torch

from inflight.conformance.calls import Ending
from inflight.conformance.checks import require
from inflight.conformance.transport.buckets import bytes_of
from inflight.conformance.transport.subject import TransportSubject
from inflight.errors import TransferError
from inflight.types import WeightBucket


def require_whole(arrived: torch.Tensor, bucket: WeightBucket) -> None:
    """Require that a tensor has the bytes of the first tensor of a bucket."""
    is_whole = bytes_of(arrived).equal(bytes_of(bucket.tensors[0]))
    require(is_whole, "a bucket that did not arrive completely was received as if it had")


def note_legal_ending(t: TransportSubject, ending: Ending[None]) -> None:
    """Record how a send ended. The send may return, which only means that the bytes were sent, or raise
    `TransferError`."""
    t.note(ending=ending.words, seconds=ending.seconds)
    require_legal(ending)


def require_legal(ending: Ending[Any], what: str = "a failed send") -> None:
    """Require that a call has returned or raised `TransferError`; ``what`` names it."""
    legal = ending.error is None or isinstance(ending.error, TransferError)
    require(legal, f"{what} must raise TransferError, but: {ending.words}")
