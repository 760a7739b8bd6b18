"""The publisher: trainer rank 0's connection to a fleet of endpoints, and the weight group that joins them.

The workers are sync and the endpoints async: a `WeightPublisher` runs the endpoints' side in an event loop of its own
thread, while the training thread gathers. This module knows the Protocols only, no engine and no trainer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal, TypeVar

import anyio.from_thread

from inflight.contracts import InferenceEndpoint, WeightSender
from inflight.engines.kinds import connect_endpoint
from inflight.errors import ConfigError, DeadlineError, InflightError, TransferError, UnsupportedError
from inflight.weights.packing import Packer
from inflight.weights.threads import run_abandonable
from inflight.weights.transports.process_group import ProcessGroupSender
from inflight.wire import Capabilities

T = TypeVar("T")

_SLACK_S = 1.0
"""How much longer than the transport's own timeout forming a group may take, so that the transport's reason arrives."""


class WeightPublisher:
    """Trainer rank 0's connection to a fleet of endpoints. Use as a context manager, or call `close`.

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
        connect_timeout_s: float = 60.0,
    ) -> None:
        names = [endpoint.name for endpoint in endpoints]
        if not names:
            raise ConfigError("a WeightPublisher needs at least one endpoint")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"endpoints are named twice: {', '.join(twice)}; each takes its own ranks of the group")
        self.run_id = run_id
        self.sender = sender
        self.packer = Packer()
        self._endpoints = tuple(endpoints)
        self._removed: list[InferenceEndpoint] = []
        self._connect_timeout_s = connect_timeout_s
        self._capabilities: dict[str, Capabilities] = {}
        self._group_is_usable = False
        self._portal: anyio.from_thread.BlockingPortal | None = None
        self._portal_context: AbstractContextManager[anyio.from_thread.BlockingPortal] | None = None

    @classmethod
    def connect(
        cls,
        urls: Sequence[str],
        *,
        run_id: str,
        token: str | None = None,
        backend: Literal["gloo", "nccl"] = "gloo",
        address: str = "127.0.0.1",
        connect_timeout_s: float = 60.0,
    ) -> WeightPublisher:
        """Return a publisher, connected, to running servers: of the contract, or an engine's own by ``ENGINE+http://``.

        ``address`` is this machine's address as the servers see it.
        """
        endpoints = [connect_endpoint(url, token=token) for url in urls]
        sender = ProcessGroupSender(backend, address)
        return cls(endpoints, sender, run_id=run_id, connect_timeout_s=connect_timeout_s).__enter__()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Names of the endpoints that the next publish goes to."""
        return tuple(endpoint.name for endpoint in self._endpoints)

    @property
    def removed(self) -> tuple[str, ...]:
        """Names of the endpoints that were removed."""
        return tuple(endpoint.name for endpoint in self._removed)

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

    def restore(self, *names: str, timeout_s: float = 1.0) -> dict[str, InflightError]:
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

    def ensure_group(self, timeout_s: float | None = None) -> None:
        """Form the weight group if it is not usable, within ``timeout_s`` (None: the connection's timeout).

        Raises `TransferError` or the endpoint's error in time: no group is left behind then, and servers that wait for
        it are told so.
        """
        if self._group_is_usable:
            return
        if not self._endpoints:
            raise ConfigError("no endpoint is left to publish to")
        self.run(self._form_group, min(timeout_s or self._connect_timeout_s, self._connect_timeout_s))
        self._group_is_usable = True

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
        self.sender.abort()

    async def _ask_capabilities(self) -> None:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                answers = await asyncio.gather(*(endpoint.capabilities() for endpoint in self._endpoints))
        except TimeoutError as error:
            names = ", ".join(self.endpoints)
            raise DeadlineError(f"not all of {names} answered within {self._connect_timeout_s:g} s") from error
        self._capabilities = {e.name: answer for e, answer in zip(self._endpoints, answers, strict=True)}

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

    async def _form_group(self, timeout_s: float) -> None:
        capabilities = [self._capabilities[endpoint.name] for endpoint in self._endpoints]
        specs = self.sender.specs(self.run_id, [c.num_ranks for c in capabilities], timeout_s)
        for endpoint, declared, spec in zip(self._endpoints, capabilities, specs, strict=True):
            if spec.backend not in declared.transports:
                self.sender.abort()
                known = ", ".join(declared.transports)
                raise UnsupportedError(
                    f"{endpoint.name} does not declare the {spec.backend} transport, it declares {known}"
                )
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
    if lacking := {*before.in_flight_policies, *before.transports} - {*now.in_flight_policies, *now.transports}:
        return UnsupportedError(f"{name} came back without {', '.join(sorted(lacking))}")
    return now
