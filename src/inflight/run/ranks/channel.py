"""The connection between the run and a trainer rank: JSON and safetensors over a socket. Nothing is pickled.

A frame is two little-endian 64-bit lengths, then a message as JSON, then a safetensors file (empty without tensors).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import TypeVar

import pydantic
import safetensors.torch
import torch

from inflight.base.validation import describe_problems
from inflight.errors import TrainerError, WorkerDiedError
from inflight.run.ranks.messages import Message, Reply, Request

T = TypeVar("T")

_LENGTHS = struct.Struct("<QQ")
_MAX_FRAME_BYTES = 1 << 32
_REQUEST: pydantic.TypeAdapter[Request] = pydantic.TypeAdapter(Request)
_REPLY: pydantic.TypeAdapter[Reply] = pydantic.TypeAdapter(Reply)


def encode(message: Message, tensors: Mapping[str, torch.Tensor] | None = None) -> bytes:
    """Return one encoded frame."""
    head = message.model_dump_json().encode()
    payload = safetensors.torch.save(dict(tensors)) if tensors else b""
    return _LENGTHS.pack(len(head), len(payload)) + head + payload


class WorkerChannel:
    """A trainer rank's end of the channel; blocking."""

    def __init__(self, connection: socket.socket) -> None:
        self._stream = connection.makefile("rb")
        self._connection = connection

    def requests(self) -> Iterator[tuple[Request, dict[str, torch.Tensor]]]:
        """Yield the run's requests until the run ends. Raises `TrainerError` for a message that is not a request."""
        with self._stream, contextlib.suppress(EOFError):
            while True:
                head_size, payload_size = _sizes(self._read(_LENGTHS.size))
                head, payload = self._read(head_size), self._read(payload_size)
                yield _parse(_REQUEST, head, "the run"), safetensors.torch.load(payload) if payload else {}

    def send(self, message: Message) -> None:
        self._connection.sendall(encode(message))

    def _read(self, size: int) -> bytes:
        data = self._stream.read(size)
        if len(data) != size:
            raise EOFError
        return data


class RunChannel:
    """The run's end of the channel to one rank; async. `send` and `receive` raise `WorkerDiedError` if it is lost."""

    def __init__(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._rank = rank
        self._reader = reader
        self._writer = writer

    async def send(self, frame: bytes) -> None:
        try:
            self._writer.write(frame)
            await self._writer.drain()
        except OSError as error:
            raise WorkerDiedError(f"the connection to trainer rank {self._rank} is lost: {error}") from error

    async def receive(self) -> Reply:
        """Wait for the next reply. Raises `TrainerError` for any other message, `WorkerDiedError` for tensors."""
        try:
            head_size, payload_size = _sizes(await self._reader.readexactly(_LENGTHS.size))
            head = await self._reader.readexactly(head_size)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise WorkerDiedError(f"trainer rank {self._rank} ended unexpectedly") from error
        if payload_size:
            raise WorkerDiedError(f"trainer rank {self._rank} sent tensors, which a run never expects")
        return _parse(_REPLY, head, f"trainer rank {self._rank}")

    def close(self) -> None:
        """Close the connection, which ends the input of the rank."""
        self._writer.close()


def _sizes(data: bytes) -> tuple[int, int]:
    head_size, payload_size = _LENGTHS.unpack(data)
    if head_size + payload_size > _MAX_FRAME_BYTES:
        raise WorkerDiedError(f"a frame of {head_size + payload_size} bytes is larger than {_MAX_FRAME_BYTES}")
    return head_size, payload_size


def _parse(kind: pydantic.TypeAdapter[T], head: bytes, sender: str) -> T:
    try:
        return kind.validate_json(head)
    except pydantic.ValidationError as error:
        raise TrainerError(f"{sender} sent a message that cannot be read: {describe_problems(error)}") from error
