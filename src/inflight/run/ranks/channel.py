"""The messages between the run and a trainer rank over a sealed channel: JSON and safetensors. Nothing is pickled.

The body of a frame consists of the length of a JSON message as a little-endian 64-bit integer, the message, and a
safetensors file, which is empty if there are no tensors.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Mapping
from typing import TypeVar

import pydantic
import safetensors.torch
import torch

from inflight.base.sealed_channel import ChannelError, SealedConnection, SealedStream
from inflight.base.validation import describe_problems
from inflight.errors import TrainerError, WorkerDiedError
from inflight.run.ranks.messages import Message, Reply, Request

T = TypeVar("T")

_LENGTH = struct.Struct("<Q")
_MAX_FRAME_BYTES = 1 << 32
_REQUEST: pydantic.TypeAdapter[Request] = pydantic.TypeAdapter(Request)
_REPLY: pydantic.TypeAdapter[Reply] = pydantic.TypeAdapter(Reply)


def encode(message: Message, tensors: Mapping[str, torch.Tensor] | None = None) -> bytes:
    """Return the body of a frame."""
    head = message.model_dump_json().encode()
    return _LENGTH.pack(len(head)) + head + (safetensors.torch.save(dict(tensors)) if tensors else b"")


class WorkerChannel:
    """A trainer rank's end of the channel, with blocking calls."""

    def __init__(self, connection: SealedConnection) -> None:
        self._connection = connection

    def requests(self) -> Iterator[tuple[Request, dict[str, torch.Tensor]]]:
        """Yield the run's requests until the run ends.

        Raises `TrainerError` for a message that is not a request or that did not come from the run.
        """
        with contextlib.suppress(EOFError):
            while True:
                try:
                    head, payload = _split(self._connection.receive(_MAX_FRAME_BYTES))
                except ChannelError as error:
                    raise TrainerError(f"the connection to the run cannot be trusted: {error}") from error
                yield _parse(_REQUEST, head, "the run"), safetensors.torch.load(payload) if payload else {}

    def send(self, message: Message) -> None:
        self._connection.send(encode(message))


class RunChannel:
    """The run's end of the channel to one rank, for asyncio.

    `send` and `receive` raise `WorkerDiedError` if the connection is lost.
    """

    def __init__(self, stream: SealedStream) -> None:
        self._rank = stream.number
        self._stream = stream

    async def send(self, frame: bytes) -> None:
        try:
            await self._stream.send(frame)
        except OSError as error:
            raise WorkerDiedError(f"the connection to trainer rank {self._rank} is lost: {error}") from error

    async def receive(self) -> Reply:
        """Wait for the next reply.

        Raises `TrainerError` if the message is not a reply, and `WorkerDiedError` if it has tensors.
        """
        try:
            head, payload = _split(await self._stream.receive(_MAX_FRAME_BYTES))
        except ChannelError as error:
            raise WorkerDiedError(f"the connection to trainer rank {self._rank} cannot be trusted: {error}") from error
        except (EOFError, OSError) as error:
            raise WorkerDiedError(f"trainer rank {self._rank} ended unexpectedly") from error
        if payload:
            raise WorkerDiedError(f"trainer rank {self._rank} sent tensors, which a run never expects")
        return _parse(_REPLY, head, f"trainer rank {self._rank}")

    def close(self) -> None:
        """Close the connection, which ends the input of the rank."""
        self._stream.close()


def _split(body: bytes) -> tuple[bytes, bytes]:
    """Return the message and its tensors."""
    (size,) = _LENGTH.unpack_from(body)
    end = _LENGTH.size + size
    return body[_LENGTH.size : end], body[end:]


def _parse(kind: pydantic.TypeAdapter[T], head: bytes, sender: str) -> T:
    try:
        return kind.validate_json(head)
    except pydantic.ValidationError as error:
        raise TrainerError(f"{sender} sent a message that cannot be read: {describe_problems(error)}") from error
