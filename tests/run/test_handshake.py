"""Only frames that the other end sent arrive between a run and its ranks, although somebody relays the connection."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from inflight.base.addresses import listen_on
from inflight.base.sealed_channel import MAX_UNPROVEN, Acceptor, SealedConnection, SealedStream
from inflight.errors import TrainerError, WorkerDiedError
from inflight.run.ranks.channel import RunChannel, WorkerChannel, encode
from inflight.run.ranks.handshake import Meeting, meet_run
from inflight.run.ranks.messages import Save, StatusMessage
from tests.gates import SOON_S

Frames = list[bytes]
HEAD_BYTES, CODE_BYTES = 48, 32
TO_RUN, TO_RANK = range(2)


class Relay:
    """Somebody between a run and its ranks: passes the handshake on, and lets a test change the frames after it."""

    def __init__(self, run: str) -> None:
        self._run = run
        self.ways: list[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = []
        """Of each connection what to read and write, to the run and to the rank."""

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._run.rpartition(":")
        from_run, to_run = await asyncio.open_connection(host, int(port))
        writer.write(await from_run.readexactly(32))
        to_run.write(await reader.readexactly(32 + 4 + 32))
        writer.write(await from_run.readexactly(32))
        self.ways.append([(reader, to_run), (from_run, writer)])

    async def take(self, connection: int, way: int, num: int) -> Frames:
        reader, _ = self.ways[connection][way]
        frames = []
        for _ in range(num):
            head = await reader.readexactly(HEAD_BYTES)
            size = struct.unpack_from("<QQ", head)[1]
            frames.append(head + await reader.readexactly(size + CODE_BYTES))
        return frames

    def put(self, connection: int, way: int, frames: Frames) -> None:
        self.ways[connection][way][1].writelines(frames)


@contextlib.asynccontextmanager
async def relayed(num_ranks: int) -> AsyncIterator[tuple[Relay, list[RunChannel], list[SealedConnection]]]:
    """Yield a relay, and both ends of the connections of all ranks that it relays."""
    meeting = await Meeting.open("127.0.0.1", "token", num_ranks)
    relay = Relay(meeting.where)
    server = await asyncio.start_server(relay.accept, "127.0.0.1", 0)
    where = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    ranks = []
    try:
        async with asyncio.timeout(SOON_S):
            runs = []
            for rank in range(num_ranks):
                ranks.append(await asyncio.to_thread(meet_run, where, "token", rank))
                runs.append(await meeting.channel(rank))
            yield relay, runs, ranks
    finally:
        server.close()
        meeting.close()
        for connection in ranks:
            connection.close()
        for way in relay.ways:
            for _, writer in way:
                writer.close()


def flipped(frame: bytes, index: int) -> bytes:
    return frame[:index] + bytes([frame[index] ^ 1]) + frame[index + 1 :]


FAULTS: dict[str, tuple[Callable[[Frames], Frames], int, str]] = {
    "nothing": (lambda frames: frames, 3, ""),
    "a byte of a body": (lambda f: [f[0], flipped(f[1], HEAD_BYTES + 12), f[2]], 1, "frame 1 was altered on the way"),
    "the last byte": (lambda f: [f[0], f[1], flipped(f[2], len(f[2]) - 1)], 2, "frame 2"),
    "its size": (lambda f: [flipped(f[0], 8), *f[1:]], 0, "frame 0 was altered on the way"),
    "its position": (lambda f: [f[0], flipped(f[1], 0), f[2]], 1, "frame 1 was altered on the way"),
    "one dropped": (lambda f: [f[0], f[2]], 1, "frame 2 arrived where frame 1 was expected"),
    "one repeated": (lambda f: [f[0], f[0], f[1]], 1, "frame 0 arrived where frame 1 was expected"),
    "two reordered": (lambda f: [f[1], f[0], f[2]], 0, "frame 1 arrived where frame 0 was expected"),
}


@pytest.mark.parametrize("way", [TO_RUN, TO_RANK], ids=["to the run", "to the rank"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_relay_cannot_change_what_arrives_after_the_handshake(fault: str, way: int) -> None:
    spoil, num_good, says = FAULTS[fault]

    async def talk() -> tuple[int, str]:
        async with relayed(1) as (relay, (run,), (connection,)):
            rank, requests = WorkerChannel(connection), WorkerChannel(connection).requests()
            for i in range(3):
                if way == TO_RUN:
                    rank.send(StatusMessage(what=f"number {i}"))
                else:
                    await run.send(encode(Save(path=Path(f"number {i}"))))
            relay.put(0, way, spoil(await relay.take(0, way, 3)))
            good = 0
            try:
                while good < 3:
                    received = await (run.receive() if way == TO_RUN else asyncio.to_thread(next, requests))
                    assert f"number {good}" in str(received)
                    good += 1
            except (TrainerError, WorkerDiedError) as error:
                return good, str(error)
            return good, ""

    good, text = asyncio.run(talk())
    assert good == num_good
    assert says in text
    assert not says or "cannot be trusted" in text


def test_frames_of_another_connection_or_of_the_other_direction_are_refused() -> None:
    async def talk(other: tuple[int, int]) -> str:
        async with relayed(2) as (relay, runs, ranks):
            for run, rank in zip(runs, ranks, strict=True):
                await run.send(encode(Save(path=Path("x"))))
                WorkerChannel(rank).send(StatusMessage(what="x"))
            relay.put(0, TO_RUN, await relay.take(*other, 1))
            with pytest.raises(WorkerDiedError, match="altered on the way, or inserted by another process") as refused:
                await runs[0].receive()
            return str(refused.value)

    for other in ((1, TO_RUN), (0, TO_RANK)):
        assert "rank 0" in asyncio.run(talk(other))


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(1024):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def test_ranks_meet_their_run_although_strangers_connect_and_prove_nothing() -> None:
    async def meet() -> None:
        meeting = await Meeting.open("127.0.0.1", "token", 1)
        host, _, port = meeting.where.rpartition(":")
        with contextlib.ExitStack() as silent:
            held = [
                silent.enter_context(await asyncio.to_thread(socket.create_connection, (host, int(port))))
                for _ in range(3 * MAX_UNPROVEN)
            ]
            with pytest.raises(TrainerError, match="rank 0 could not connect"):
                await asyncio.to_thread(meet_run, meeting.where, "another token", 0)
            connection = await asyncio.to_thread(meet_run, meeting.where, "token", 0)
            channel = await meeting.channel(0)
            WorkerChannel(connection).send(StatusMessage(what="here"))
            assert await channel.receive() == StatusMessage(what="here")
            connection.close()
            assert sum(map(is_closed, held)) >= 2 * MAX_UNPROVEN
        meeting.close()

    asyncio.run(asyncio.wait_for(meet(), SOON_S))


@pytest.mark.parametrize("num_rounds", range(5))
def test_a_connection_that_arrives_while_the_port_is_closed_is_closed_too(num_rounds: int) -> None:
    async def never(stream: SealedStream) -> None:
        raise AssertionError("nothing was proved")

    async def close_while_it_arrives(client: socket.socket) -> None:
        acceptor, listener = Acceptor(b"secret", never), listen_on("127.0.0.1")
        await acceptor.listen(listener)
        client.connect(listener.getsockname())
        for _ in range(num_rounds):
            await asyncio.sleep(0)
        await acceptor.aclose()

    with socket.socket() as client:
        asyncio.run(close_while_it_arrives(client))
        assert is_closed(client)
    gc.collect()  # what was left open is warned of
