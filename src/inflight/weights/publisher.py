"""The publisher: trainer rank 0's connection to a fleet of endpoints, and the weight group that joins them.

The workers are sync and the endpoints async: a `WeightPublisher` runs the endpoints' side in an event loop of its own
thread, while the training thread gathers. This module knows the Protocols only, no engine and no trainer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, get_args

import anyio.from_thread

from inflight.contracts import InferenceEndpoint, WeightSender
from inflight.engines.kinds import connect_endpoint
from inflight.errors import ConfigError, DeadlineError, InflightError, TransferError, UnsupportedError
from inflight.weights.encoding import Rounding
from inflight.weights.packing import Packer
from inflight.weights.snapshot import Snapshot
from inflight.weights.threads import run_abandonable
from inflight.weights.transports import make_sender
from inflight.wire import Backend, Capabilities, Encoding, TransportSpec, WeightUpdate

T = TypeVar("T")

ANSWER_S = 2.0
"""How long an endpoint may take for an answer that an idle one gives in milliseconds, while others could go on."""
_SLACK_S = 1.0
"""How much longer than the transport's own timeout forming a group may take, so that the transport's reason arrives."""


class WeightPublisher:
    """Trainer rank 0's connection to a fleet of endpoints. Use as a context manager, or call `close`.

    ``encoding`` rounds weights on the way; ``delta`` sends only what changed since the last publish that every endpoint
    applied, for one more copy of the weights in host memory on each side. ``staged`` lets sampling go on while weights
    arrive, on the endpoints that declare it. ``epoch`` tells the incarnations of a run's trainer apart: the endpoints
    refuse those below the highest they have seen; None is one more than that.

    Entering asks each endpoint for its capabilities and forms the weight group; it raises `ConfigError`,
    `UnsupportedError`, `UnreachableError`, `UnauthorizedError`, `DeadlineError` or `TransferError` if that fails, and
    nothing is left behind. After a failed publish the group is formed anew by the next one, with the endpoints that
    were not removed. Used from one thread at a time.
    """

    def __init__(
        self,
        endpoints: Sequence[InferenceEndpoint],
        sender: WeightSender,
        *,
        run_id: str,
        epoch: int | None = None,
        encoding: Rounding = "raw",
        delta: bool = False,
        staged: bool = True,
        connect_timeout_s: float = 60.0,
    ) -> None:
        names = [endpoint.name for endpoint in endpoints]
        if not names:
            raise ConfigError("a WeightPublisher needs at least one endpoint")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"endpoints are named twice: {', '.join(twice)}; each takes its own ranks of the group")
        if encoding not in get_args(Rounding):
            raise ConfigError(f"encoding must be one of {', '.join(get_args(Rounding))}, not {encoding!r}")
        if delta and encoding != "raw":
            raise ConfigError(
                f"delta sends changed elements as they are; encoding must be 'raw' then, not {encoding!r}"
            )
        self.run_id = run_id
        self.sender = sender
        self.encoding: Rounding = encoding
        self.staged = staged
        self.delta = delta
        self.snapshot = Snapshot() if delta else None
        self._epoch = epoch
        self.packer = Packer()
        self._endpoints = tuple(endpoints)
        self._removed: list[InferenceEndpoint] = []
        self._connect_timeout_s = connect_timeout_s
        self._capabilities: dict[str, Capabilities] = {}
        self._group_is_usable = False
        self._backend: Backend | None = None
        self._ending: asyncio.Future[None] | None = None
        self._portal: anyio.from_thread.BlockingPortal | None = None
        self._portal_context: AbstractContextManager[anyio.from_thread.BlockingPortal] | None = None

    @classmethod
    def connect(
        cls,
        urls: Sequence[str],
        *,
        run_id: str,
        token: str | None = None,
        backend: Backend = "gloo",
        address: str = "127.0.0.1",
        directory: Path | None = None,
        connect_timeout_s: float = 60.0,
        **options: Any,
    ) -> WeightPublisher:
        """Return a publisher, connected, to running servers: of the contract, or an engine's own by ``ENGINE+http://``.

        ``backend`` is how weights travel, see `make_sender`. ``address`` is this machine's address as the servers see
        it. ``options`` are those of the constructor.
        """
        endpoints = [connect_endpoint(url, token=token) for url in urls]
        sender = make_sender(backend, address=address, directory=directory)
        return cls(endpoints, sender, run_id=run_id, connect_timeout_s=connect_timeout_s, **options).__enter__()

    @property
    def epoch(self) -> int:
        """Which incarnation of the run's trainer this is; 0 until it is connected."""
        return self._epoch or 0

    @property
    def encodings(self) -> tuple[Encoding, ...]:
        """How buckets may travel, which every endpoint has to understand."""
        return ("delta",) if self.delta else (self.encoding,)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Names of the endpoints that the next publish goes to."""
        return tuple(endpoint.name for endpoint in self._endpoints)

    @property
    def removed(self) -> tuple[str, ...]:
        """Names of the endpoints that were removed."""
        return tuple(endpoint.name for endpoint in self._removed)

    @property
    def backend(self) -> Backend | None:
        """How buckets travel, as the group says that was formed last; None before there was one."""
        return self._backend

    @property
    def has_group(self) -> bool:
        """True while the group of an earlier publish is in use."""
        return self._group_is_usable

    @property
    def members(self) -> tuple[InferenceEndpoint, ...]:
        """The endpoints that the next publish goes to; their calls belong into `run` and `start`."""
        return self._endpoints

    @property
    def capabilities(self) -> dict[str, Capabilities]:
        """What each endpoint declared when the publisher connected, or restored it."""
        return dict(self._capabilities)

    def __enter__(self) -> WeightPublisher:
        if self._portal is not None:
            return self
        self._portal_context = anyio.from_thread.start_blocking_portal("asyncio")
        self._portal = self._portal_context.__enter__()
        try:
            self.run(self._ask_capabilities)
            self.ensure_group()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the group and close the connections; servers go on. Idempotent."""
        self.lose_group()
        if self._portal is not None and self._portal_context is not None:
            self._portal.call(self._close_endpoints)
            self._portal = None
            self._portal_context.__exit__(None, None, None)

    def remove(self, name: str) -> None:
        """Leave an endpoint out from now on; the next publish forms the group anew. Unknown names are ignored."""
        found = [endpoint for endpoint in self._endpoints if endpoint.name == name]
        if found:
            self._removed += found
            self._endpoints = tuple(endpoint for endpoint in self._endpoints if endpoint.name != name)
            self._group_is_usable = False

    def add(self, endpoint: InferenceEndpoint, timeout_s: float = 10.0) -> None:
        """Have the next publish go to one more endpoint, in a group formed anew.

        It is asked for its capabilities first; whatever that raises, the fleet is as before. Raises `ConfigError` if an
        endpoint has that name already, `UnsupportedError` if it does not declare how weights are encoded here.
        """
        if endpoint.name in (*self.endpoints, *self.removed):
            raise ConfigError(f"{endpoint.name} is an endpoint of this publisher already")

        async def ask() -> Capabilities:
            try:
                async with asyncio.timeout(timeout_s):
                    return await endpoint.capabilities()
            except TimeoutError as error:
                raise DeadlineError(f"did not answer within {timeout_s:g} s", endpoint.name) from error

        can = self.run(ask)
        if lack := can.lacks(encodings=self.encodings):
            raise UnsupportedError(f"{endpoint.name} does not declare {lack}")
        self._capabilities[endpoint.name] = can
        self._endpoints += (endpoint,)
        self._group_is_usable = False

    def drop(self, name: str) -> None:
        """Forget an endpoint, removed or not, and close the connection to it. Unknown names are ignored."""
        self.remove(name)
        found = [endpoint for endpoint in self._removed if endpoint.name == name]
        self._removed = [endpoint for endpoint in self._removed if endpoint.name != name]
        for endpoint in found:
            del self._capabilities[name]
            self.run(endpoint.aclose)

    def silent(self, num_needed: int, timeout_s: float) -> tuple[str, ...]:
        """Ask every endpoint for its version; return the names of those that gave no answer, not even an error.

        Each has `ANSWER_S` seconds. If fewer than ``num_needed`` answered by then, the others have up to ``timeout_s``.
        """
        return self.run(self._ask_present, num_needed, timeout_s)

    def restore(self, *names: str, timeout_s: float = ANSWER_S) -> dict[str, InflightError]:
        """Have the next publish go to removed endpoints again, in a group formed anew; names that are not are ignored.

        Each is asked first for its capabilities and its version, within ``timeout_s`` seconds, all at the same time.
        Returns why those that stay removed do: they gave no answer, or do not declare what they did before.
        """
        asked = [endpoint for endpoint in self._removed if endpoint.name in names]
        if not asked:
            return {}
        answers = self.run(self._ask_again, asked, timeout_s)
        back = [endpoint for endpoint in asked if not isinstance(answers[endpoint.name], InflightError)]
        self._capabilities |= {name: can for name, can in answers.items() if not isinstance(can, InflightError)}
        if back:
            self._removed = [endpoint for endpoint in self._removed if endpoint not in back]
            self._endpoints += tuple(back)
            self._group_is_usable = False
        return {name: answer for name, answer in answers.items() if isinstance(answer, InflightError)}

    def ensure_group(self) -> None:
        """Form the weight group of all endpoints unless there is one.

        Raises `TransferError` or an endpoint's error in time; then no group is left behind, and servers that wait for
        it are told so.
        """
        self.run(self.form_group, self._connect_timeout_s, len(self._endpoints))

    def forget_group(self) -> None:
        """Have the next publish form the group anew; what is pending on this one goes on."""
        self._group_is_usable = False

    async def begin_update(self, update: WeightUpdate, timeout_s: float) -> None:
        """Have the sender take the buckets of ``update``, once it is done with those of the update before.

        Raises `TransferError`.
        """
        ending, self._ending = self._ending, None
        if ending is not None:
            try:
                await asyncio.wait_for(ending, timeout_s)
            except TimeoutError as error:
                raise TransferError(f"the update before was not cleared away within {timeout_s:g} s") from error
        await run_abandonable(lambda: self.sender.begin(update), "inflight-begin")

    def end_update(self, *, is_done: bool) -> None:
        """Tell the sender that every endpoint has what it is to get; it clears away in the background.

        ``is_done`` says that no endpoint will read any of it again: false if one was left behind. Called in the
        publisher's event loop.
        """
        call = run_abandonable(lambda: self.sender.end(is_done=is_done), "inflight-end")
        self._ending = asyncio.ensure_future(call)
        self._ending.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # the next update asks

    def run(self, call: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run an async call in the publisher's event loop and return its result; interrupting it cancels the call."""
        future = self.start(call, *args)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start(self, call: Callable[..., Awaitable[T]], *args: Any) -> Future[T]:
        """Start an async call in the publisher's event loop."""
        if self._portal is None:
            raise ConfigError("this WeightPublisher is not connected; use it as a context manager")
        return self._portal.start_task_soon(call, *args)

    def lose_group(self) -> None:
        """Give the group up, ending what is pending on it; the next publish forms it anew. Any thread may call it."""
        self._group_is_usable = False
        self.packer = Packer()  # a send that was left behind may still read the buffers
        if self.snapshot is not None:
            self.snapshot = Snapshot()  # who holds what it says is not known any more
        self.sender.abort()

    async def _ask_capabilities(self) -> None:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                answers = await asyncio.gather(*(endpoint.capabilities() for endpoint in self._endpoints))
                versions = await asyncio.gather(*(endpoint.weight_version() for endpoint in self._endpoints))
        except TimeoutError as error:
            names = ", ".join(self.endpoints)
            raise DeadlineError(f"not all of {names} answered within {self._connect_timeout_s:g} s") from error
        self._capabilities = {e.name: answer for e, answer in zip(self._endpoints, answers, strict=True)}
        if self._epoch is None:
            self._epoch = 1 + max((v.epoch for v in versions if v.owner_run_id == self.run_id), default=0)

    async def _ask_again(
        self, endpoints: Sequence[InferenceEndpoint], timeout_s: float
    ) -> dict[str, Capabilities | InflightError]:
        async def one(endpoint: InferenceEndpoint) -> Capabilities | InflightError:
            try:
                async with asyncio.timeout(timeout_s):
                    can = await endpoint.capabilities()
                    await endpoint.weight_version()  # capabilities may be remembered: this one asks the server
            except TimeoutError:
                return DeadlineError(f"did not answer within {timeout_s:g} s", endpoint.name)
            except InflightError as error:
                return error
            return _as_before(endpoint.name, self._capabilities[endpoint.name], can)

        answers = await asyncio.gather(*(one(endpoint) for endpoint in endpoints))
        return {endpoint.name: answer for endpoint, answer in zip(endpoints, answers, strict=True)}

    async def _ask_present(self, num_needed: int, timeout_s: float) -> tuple[str, ...]:
        calls = {endpoint.name: asyncio.ensure_future(endpoint.weight_version()) for endpoint in self._endpoints}
        pending = set(calls.values())
        if not calls:
            return ()
        try:
            _, pending = await asyncio.wait(pending, timeout=min(ANSWER_S, timeout_s))
            deadline = time.monotonic() + timeout_s - ANSWER_S
            while pending and len(calls) - len(pending) < num_needed and (left_s := deadline - time.monotonic()) > 0:
                _, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            return tuple(name for name, call in calls.items() if call in pending)
        finally:
            for call in calls.values():
                call.cancel()
            await asyncio.gather(*calls.values(), return_exceptions=True)

    async def form_group(self, timeout_s: float, num_needed: int) -> dict[str, InflightError]:
        """Form the weight group within ``timeout_s`` unless there is one; return why endpoints could not join it.

        An endpoint can be missing only where the transport is not collective and ``num_needed`` others have joined.
        Otherwise its error is raised, or `TransferError`, and no group is left behind.
        """
        if self._group_is_usable:
            return {}
        if not self._endpoints:
            raise ConfigError("no endpoint is left to publish to")
        failures = await self._form_group(min(timeout_s, self._connect_timeout_s), num_needed)
        self._group_is_usable = not failures
        return failures

    async def _form_group(self, timeout_s: float, num_needed: int) -> dict[str, InflightError]:
        capabilities = [self._capabilities[endpoint.name] for endpoint in self._endpoints]
        opened = self.sender.specs(self.run_id, [c.num_ranks for c in capabilities], timeout_s)
        specs = [spec.model_copy(update={"epoch": self.epoch}) for spec in opened]
        for endpoint, declared, spec in zip(self._endpoints, capabilities, specs, strict=True):
            if lack := declared.lacks(transport=spec.backend):
                self.sender.abort()
                raise UnsupportedError(f"{endpoint.name} does not declare {lack}")
            self._backend = spec.backend
        if not self.sender.is_collective:
            return await self._form_each(specs, timeout_s, num_needed)
        calls: list[asyncio.Future[None]] = [
            asyncio.ensure_future(endpoint.init_process_group(spec))
            for endpoint, spec in zip(self._endpoints, specs, strict=True)
        ]
        calls.append(asyncio.ensure_future(run_abandonable(self.sender.join, "inflight-join")))
        try:
            async with asyncio.timeout(timeout_s + _SLACK_S):
                await asyncio.gather(*calls)
        except BaseException as error:
            self.sender.abort()
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            if isinstance(error, TimeoutError):
                raise TransferError(f"the weight group was not formed within {timeout_s:g} s") from error
            raise
        return {}

    async def _form_each(
        self, specs: Sequence[TransportSpec], timeout_s: float, num_needed: int
    ) -> dict[str, InflightError]:
        """Have each endpoint join by itself; returns why some could not. Raises the first error if too few could."""

        async def one(endpoint: InferenceEndpoint, spec: TransportSpec) -> InflightError | None:
            try:
                async with asyncio.timeout(timeout_s + _SLACK_S):
                    await endpoint.init_process_group(spec)
            except TimeoutError:
                return DeadlineError(f"did not join within {timeout_s:g} s", endpoint.name)
            except InflightError as error:
                return error
            return None

        await run_abandonable(self.sender.join, "inflight-join")
        pairs = zip(self._endpoints, specs, strict=True)
        answers = await asyncio.gather(*(one(endpoint, spec) for endpoint, spec in pairs))
        failures = {e.name: error for e, error in zip(self._endpoints, answers, strict=True) if error is not None}
        if len(answers) - len(failures) < num_needed:
            self.sender.abort()
            raise next(iter(failures.values()))
        return failures

    async def _close_endpoints(self) -> None:
        endpoints = (*self._endpoints, *self._removed)
        await asyncio.gather(*(endpoint.aclose() for endpoint in endpoints), return_exceptions=True)


def _as_before(name: str, before: Capabilities, now: Capabilities) -> Capabilities | UnsupportedError:
    """Return what an endpoint declares now, or an error if less may be asked of it than before."""
    if (now.dtype, now.vocab_size) != (before.dtype, before.vocab_size):
        return UnsupportedError(
            f"{name} came back with {now.model} in {now.dtype} with {now.vocab_size} tokens, "
            f"it was {before.model} in {before.dtype} with {before.vocab_size}"
        )
    needed = {*before.in_flight_policies, *before.transports, *before.encodings}
    if lacking := needed - {*now.in_flight_policies, *now.transports, *now.encodings}:
        return UnsupportedError(f"{name} came back without {', '.join(sorted(lacking))}")
    return now
