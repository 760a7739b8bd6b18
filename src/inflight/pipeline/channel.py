"""Messages between the run and its trainer ranks: JSON and safetensors over a socket pair. Nothing is pickled.

A frame is two little-endian 64-bit lengths, then a JSON object, then a safetensors file (empty if there is no tensor).
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch

from inflight.errors import WorkerDiedError

_LENGTHS = struct.Struct("<QQ")
_MAX_FRAME_BYTES = 1 << 32

Message = dict[str, Any]


def encode(message: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None) -> bytes:
    """Return one frame."""
    head = json.dumps(message).encode()
    payload = safetensors.torch.save(dict(tensors)) if tensors else b""
    return _LENGTHS.pack(len(head), len(payload)) + head + payload


class WorkerChannel:
    """A trainer rank's end; blocking. `receive` raises `EOFError` when the run is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._stream = connection.makefile("rb")
        self._connection = connection

    def receive(self) -> tuple[Message, dict[str, torch.Tensor]]:
        """Wait for the next message."""
        head_size, payload_size = _sizes(self._read(_LENGTHS.size))
        message = json.loads(self._read(head_size))
        payload = self._read(payload_size)
        return message, safetensors.torch.load(payload) if payload else {}

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message without tensors."""
        self._connection.sendall(encode(message))

    def _read(self, size: int) -> bytes:
        data = self._stream.read(size)
        if len(data) != size:
            raise EOFError("the run has ended")
        return data


class RunChannel:
    """The run's end of the channel to one rank; async. `receive` raises `WorkerDiedError` when the rank is gone."""

    def __init__(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._rank = rank
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, rank: int, connection: socket.socket) -> RunChannel:
        """Return the channel over one end of a socket pair."""
        connection.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 20)
        return cls(rank, reader, writer)

    async def send(self, frame: bytes) -> None:
        """Send a frame made by `encode`."""
        try:
            self._writer.write(frame)
            await self._writer.drain()
        except OSError as error:
            raise WorkerDiedError(f"trainer rank {self._rank} is gone: {error}") from error

    async def receive(self) -> Message:
        """Wait for the next message; its tensors, if any, are refused."""
        try:
            head_size, payload_size = _sizes(await self._reader.readexactly(_LENGTHS.size))
            head = await self._reader.readexactly(head_size)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise WorkerDiedError(f"trainer rank {self._rank} ended unexpectedly") from error
        if payload_size:
            raise WorkerDiedError(f"trainer rank {self._rank} sent tensors, which a run never expects")
        message: Message = json.loads(head)
        return message

    def close(self) -> None:
        """Close the connection; the rank sees the end of its input."""
        self._writer.close()


def _sizes(data: bytes) -> tuple[int, int]:
    head_size, payload_size = _LENGTHS.unpack(data)
    if head_size + payload_size > _MAX_FRAME_BYTES:
        raise WorkerDiedError(f"a frame of {head_size + payload_size} bytes is larger than {_MAX_FRAME_BYTES}")
    return head_size, payload_size
