"""The publisher: trainer rank 0's connection to endpoints, and the weight group of those that it publishes to.

Workers are sync and endpoints async: a `WeightPublisher` runs the endpoints' side in an event loop in a thread of its
own, while the training thread gathers. This module knows the Protocols only, no engine and no trainer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, get_args

import anyio.from_thread

from inflight.base.threads import run_abandonable
from inflight.base.transport_registry import refusal
from inflight.contracts import InferenceEndpoint, WeightSender
from inflight.errors import ConfigError, DeadlineError, InflightError, TransferError, UnsupportedError
from inflight.http.kinds import connect_endpoint
from inflight.weights.encode.bucket_bytes import Packer, Rounding
from inflight.weights.encode.delta import Snapshot
from inflight.weights.send.endpoint_update import declared
from inflight.weights.transports import make_sender
from inflight.wire import Capabilities, Encoding, TransportName, TransportSpec, WeightUpdate

T = TypeVar("T")

_SLACK_S = 1.0
"""How much longer forming a group may take than the transport's own timeout, so that the transport's reason arrives."""


class WeightPublisher:
    """Trainer rank 0's connection to endpoints. Use it as a context manager, or call `close`.

    ``incarnation`` counts the times a run's trainer was started: endpoints refuse calls of a lower incarnation than the
    highest they have seen. None takes one more than that. ``encoding`` rounds weights on the way. ``delta`` sends only
    what changed since the last publish that every endpoint applied, for one more copy of the weights in host memory on
    each side. ``staged`` lets sampling go on while weights arrive, on the endpoints that declare it.
    ``connect_timeout_s`` is the longest wait for the endpoints' answers, and for a weight group to form.

    Entering asks each endpoint for its capabilities and forms the weight group. If that fails, it raises `ConfigError`,
    `UnsupportedError`, `UnreachableError`, `UnauthorizedError`, `DeadlineError` or `TransferError`, and leaves nothing
    behind. A publish forms the group anew if it goes to other endpoints than the one before, and after a failed
    publish. Used from one thread at a time.
    """

    def __init__(
        self,
        endpoints: Sequence[InferenceEndpoint],
        sender: WeightSender,
        *,
        run_id: str,
        incarnation: int | None = None,
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
                f"delta sends changed elements without rounding them, so encoding must be 'raw', not {encoding!r}"
            )
        self.run_id = run_id
        self.sender = sender
        self.encoding: Rounding = encoding
        self.staged = staged
        self.delta = delta
        self.snapshot = Snapshot() if delta else None
        self.packer = Packer()
        self.merges_lora = False
        """Whether a LoRA has been published as the weights that it changes."""
        self._incarnation = incarnation
        self._connected = tuple(endpoints)
        self._declared: dict[InferenceEndpoint, Capabilities] = {}
        self._connect_timeout_s = connect_timeout_s
        self._group: frozenset[InferenceEndpoint] = frozenset()
        self._transport: TransportName | None = None
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
        transport: TransportName = "gloo",
        address: str = "127.0.0.1",
        directory: Path | None = None,
        incarnation: int | None = None,
        encoding: Rounding = "raw",
        delta: bool = False,
        staged: bool = True,
        connect_timeout_s: float = 60.0,
    ) -> WeightPublisher:
        """Return a connected publisher for servers of the contract, or an engine's own servers by ``ENGINE+http://``.

        ``token`` is the servers' control token, None if they need none. ``transport`` is how weights travel, see
        `make_sender`. ``address`` is this machine's address as the servers see it. ``directory`` is where ``file``
        stores weights. The class explains the others.
        """
        return cls(
            [connect_endpoint(url, token=token) for url in urls],
            make_sender(transport, address=address, directory=directory),
            run_id=run_id,
            incarnation=incarnation,
            encoding=encoding,
            delta=delta,
            staged=staged,
            connect_timeout_s=connect_timeout_s,
        ).__enter__()

    @property
    def incarnation(self) -> int:
        """The incarnation of the run's trainer; 0 until connected."""
        return self._incarnation or 0

    @property
    def encodings(self) -> tuple[Encoding, ...]:
        """The encodings in which buckets may travel; every endpoint has to declare them."""
        return ("delta",) if self.delta else (self.encoding,)

    @property
    def endpoints(self) -> Mapping[InferenceEndpoint, Capabilities]:
        """The connected endpoints, and what each declared. Their calls belong into `run` and `start`."""
        return self._declared

    @property
    def transport(self) -> TransportName | None:
        """The transport of the last group that was formed, None before the first."""
        return self._transport

    @property
    def group(self) -> frozenset[InferenceEndpoint]:
        """The endpoints of the weight group in use; empty if there is none."""
        return self._group

    def __enter__(self) -> WeightPublisher:
        if self._portal is not None:
            return self
        self._portal_context = anyio.from_thread.start_blocking_portal("asyncio")
        self._portal = self._portal_context.__enter__()
        try:
            self.run(self._connect)
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
            self._portal.call(close_all, self._connected)
            self._portal = None
            self._portal_context.__exit__(None, None, None)

    async def begin_update(self, update: WeightUpdate, timeout_s: float) -> None:
        """Prepare the sender for the buckets of ``update``, once it has cleared away the update before.

        Raises `TransferError`.
        """
        ending, self._ending = self._ending, None
        if ending is not None:
            try:
                await asyncio.wait_for(ending, timeout_s)
            except TimeoutError as error:
                raise TransferError(f"the previous update was not cleared away within {timeout_s:g} s") from error
        await run_abandonable(lambda: self.sender.begin(update), "inflight-begin")

    def end_update(self, *, is_done: bool) -> None:
        """Tell the sender that every endpoint has what it will get. The sender clears away in the background.

        ``is_done`` says that no endpoint will read any of the update again: false if one was left behind. Called in the
        publisher's event loop.
        """
        call = run_abandonable(lambda: self.sender.end(is_done=is_done), "inflight-end")
        self._ending = asyncio.ensure_future(call)
        self._ending.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # the next update asks

    def run(self, call: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run an async call in the publisher's event loop and return its result. Interrupting it cancels the call."""
        future = self.start(call, *args)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start(self, call: Callable[..., Awaitable[T]], *args: Any) -> Future[T]:
        if self._portal is None:
            raise ConfigError("this WeightPublisher is not connected; use it as a context manager")
        return self._portal.start_task_soon(call, *args)

    def lose_group(self) -> None:
        """Give up the group and end what is pending on it; the next publish forms it anew. Any thread may call it."""
        self._group = frozenset()
        self.packer = Packer()  # an abandoned send may still read the buffers
        if self.snapshot is not None:
            self.snapshot = Snapshot()  # it is not known any more which endpoints hold its weights
        self.sender.abort()

    def left_group(self, endpoint: InferenceEndpoint) -> None:
        """Note that an endpoint has left the group; the others go on with it."""
        self._group -= {endpoint}

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                found = await asyncio.gather(*(declared(endpoint) for endpoint in self._connected))
        except TimeoutError as error:
            names = ", ".join(endpoint.name for endpoint in self._connected)
            raise DeadlineError(f"not all of {names} answered within {self._connect_timeout_s:g} s") from error
        self._declared = {endpoint: can for endpoint, (can, _) in zip(self._connected, found, strict=True)}
        if self._incarnation is None:
            self._incarnation = 1 + max((v.incarnation for _, v in found if v.owner_run_id == self.run_id), default=0)
        await self.form_group(self._declared, self._connect_timeout_s, len(self._declared))

    async def form_group(
        self, endpoints: Mapping[InferenceEndpoint, Capabilities], timeout_s: float, num_needed: int
    ) -> dict[str, InflightError]:
        """Form the weight group of some endpoints unless it is in use; return why some of them could not join it.

        An endpoint can be missing only if the transport is not collective and ``num_needed`` others have joined.
        Otherwise its error is raised, or `TransferError`, in time. Then no group is left behind, and servers that wait
        for it are told so.
        """
        if not endpoints:
            raise ConfigError("no endpoint is left to publish to")
        if self._group == endpoints.keys():
            return {}
        self._group = frozenset()
        timeout_s = min(timeout_s, self._connect_timeout_s)
        opened = self.sender.specs(self.run_id, [can.num_ranks for can in endpoints.values()], timeout_s)
        specs = {
            endpoint: spec.model_copy(update={"incarnation": self.incarnation})
            for endpoint, spec in zip(endpoints, opened, strict=True)
        }
        for endpoint, spec in specs.items():
            if lack := refusal(endpoints[endpoint], spec.transport):
                self.sender.abort()
                raise UnsupportedError(f"{endpoint.name} does not support {lack}")
            self._transport = spec.transport
        form = self._form_at_once if self.sender.is_collective else self._form_each
        failures = await form(specs, timeout_s, num_needed)
        self._group = frozenset(endpoint for endpoint in endpoints if endpoint.name not in failures)
        return failures

    async def _form_at_once(
        self, specs: Mapping[InferenceEndpoint, TransportSpec], timeout_s: float, _: int
    ) -> dict[str, InflightError]:
        """Let all endpoints join together, or none."""
        calls: list[asyncio.Future[None]] = [
            asyncio.ensure_future(endpoint.init_process_group(spec)) for endpoint, spec in specs.items()
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
        self, specs: Mapping[InferenceEndpoint, TransportSpec], timeout_s: float, num_needed: int
    ) -> dict[str, InflightError]:
        """Let each endpoint join by itself; return why some could not. Raises the first error if too few could."""

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
        joined = await asyncio.gather(*(one(endpoint, spec) for endpoint, spec in specs.items()))
        failures = {e.name: error for e, error in zip(specs, joined, strict=True) if error is not None}
        if len(specs) - len(failures) < num_needed:
            self.sender.abort()
            raise next(iter(failures.values()))
        return failures


async def close_all(endpoints: Iterable[InferenceEndpoint]) -> None:
    """Close the connections to some endpoints; the servers go on."""
    await asyncio.gather(*(endpoint.aclose() for endpoint in endpoints), return_exceptions=True)
