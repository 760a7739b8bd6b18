"""Ends of the channel between a run and a rank, over sockets of a test."""

from __future__ import annotations

import asyncio
import socket

import torch

from inflight.base.sealed_channel import SealedConnection, SealedStream
from inflight.run.ranks.channel import RunChannel, WorkerChannel
from inflight.run.ranks.messages import Reply, Request

_KEYS = (b"a secret", b"two nonces")


def asked(frame: bytes) -> tuple[Request, dict[str, torch.Tensor]]:
    """What a rank receives."""
    ours, theirs = socket.socketpair()

    async def send() -> None:
        stream = SealedStream(0, *await asyncio.open_connection(sock=ours), *_KEYS)
        await stream.send(frame)
        stream.close()

    with theirs:
        asyncio.run(send())
        return next(WorkerChannel(SealedConnection(theirs, *_KEYS)).requests())


def answered(frame: bytes) -> Reply:
    """What the run receives."""
    ours, theirs = socket.socketpair()

    async def receive() -> Reply:
        channel = RunChannel(SealedStream(0, *await asyncio.open_connection(sock=ours), *_KEYS))
        try:
            return await channel.receive()
        finally:
            channel.close()

    with theirs:
        SealedConnection(theirs, *_KEYS).send(frame)
        return asyncio.run(receive())
