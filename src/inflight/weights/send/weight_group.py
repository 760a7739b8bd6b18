"""The weight group: the endpoints that receive a trainer's buckets together, and the sender of the buckets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from functools import partial

from inflight.base.tasks import combine_failures
from inflight.base.threads import run_abandonable, start_in_thread
from inflight.base.transport_registry import refusal
from inflight.contracts import InferenceEndpoint, WeightSender
from inflight.errors import ConfigError, DeadlineError, InflightError, TransferError, UnsupportedError
from inflight.types import WeightBucket
from inflight.weights.encode.bucket_bytes import Rounding
from inflight.weights.send.encoder import BucketEncoder
from inflight.weights.send.endpoint_update import query_endpoints, retry_unanswered
from inflight.wire import Capabilities, TransportName, TransportSpec, WeightUpdate, WeightVersion

_SLACK_S = 1.0
"""Extra time in seconds, beyond the transport's own timeout for forming a group, so that its error arrives first."""


class WeightGroup:
    """The weight group of one trainer. It is formed, used for one update at a time, and lost after a failure.

    Coroutines run in the publisher's event loop. Forming takes at most ``form_timeout_s`` seconds.
    """

    def __init__(
        self, sender: WeightSender, *, run_id: str, encoding: Rounding, delta: bool, form_timeout_s: float
    ) -> None:
        self.sender = sender
        self.encoder = BucketEncoder(sender, encoding=encoding, delta=delta)
        self._run_id = run_id
        self._form_timeout_s = form_timeout_s
        self._members: frozenset[InferenceEndpoint] = frozenset()
        self._transport: TransportName | None = None
        self._ending: Future[None] | None = None

    @property
    def members(self) -> frozenset[InferenceEndpoint]:
        """The endpoints of the current group; empty if there is none."""
        return self._members

    @property
    def transport(self) -> TransportName | None:
        """The transport of the last group that was formed; None before the first group."""
        return self._transport

    # ------------------------------------------------------------------------------------------------------ forming

    async def form(
        self, endpoints: Mapping[InferenceEndpoint, Capabilities], incarnation: int, timeout_s: float, num_needed: int
    ) -> dict[str, InflightError]:
        """Form the group of these endpoints, unless it is the current one. Return why some of them could not join.

        An endpoint may be missing only if the transport is not collective and ``num_needed`` endpoints have joined.
        Otherwise, the endpoint's error or `TransferError` is raised within about ``timeout_s`` seconds; no group then
        remains, and servers that are waiting for the group are notified.
        """
        if not endpoints:
            raise ConfigError("no endpoint is left to publish the weights to")
        if self._members == endpoints.keys():
            return {}
        self._members = frozenset()
        timeout_s = min(timeout_s, self._form_timeout_s)
        num_ranks = [can.num_ranks for can in endpoints.values()]
        opened = await run_abandonable(lambda: self.sender.specs(self._run_id, num_ranks, timeout_s), "inflight-open")
        specs = {
            endpoint: spec.model_copy(update={"incarnation": incarnation})
            for endpoint, spec in zip(endpoints, opened, strict=True)
        }
        for endpoint, spec in specs.items():
            if lack := refusal(endpoints[endpoint], spec.transport):
                self.sender.abort()
                raise UnsupportedError(f"{endpoint.name} does not support {lack}")
            self._transport = spec.transport
        form = self._form_together if self.sender.is_collective else self._form_each
        failures = await form(specs, timeout_s, num_needed)
        self._members = frozenset(endpoint for endpoint in endpoints if endpoint.name not in failures)
        return failures

    async def _form_together(
        self, specs: Mapping[InferenceEndpoint, TransportSpec], timeout_s: float, _: int
    ) -> dict[str, InflightError]:
        """Make all endpoints join together or not at all. Raises the first error, with all errors as its cause."""

        async def join(call: Callable[[], Awaitable[None]]) -> None:
            try:
                await call()
            except BaseException:
                self.sender.abort()  # at once, so that no other rank waits for this one
                raise

        try:
            async with asyncio.timeout(timeout_s + _SLACK_S), asyncio.TaskGroup() as tasks:
                for endpoint, spec in specs.items():
                    tasks.create_task(join(partial(endpoint.init_process_group, spec)))
                tasks.create_task(join(partial(run_abandonable, self.sender.join, "inflight-join")))
        except BaseException as error:
            self.sender.abort()
            if isinstance(error, TimeoutError):
                raise TransferError(f"the weight group was not formed within {timeout_s:g} s") from error
            if isinstance(error, ExceptionGroup):
                raise combine_failures(error.exceptions) from error
            raise
        return {}

    async def _form_each(
        self, specs: Mapping[InferenceEndpoint, TransportSpec], timeout_s: float, num_needed: int
    ) -> dict[str, InflightError]:
        """Make each endpoint join independently. Return why some could not. Raises the first error if too few could."""
        failures: dict[str, InflightError] = {}

        async def join(endpoint: InferenceEndpoint, spec: TransportSpec) -> None:
            try:
                async with asyncio.timeout(timeout_s + _SLACK_S):
                    await endpoint.init_process_group(spec)
            except TimeoutError:
                failures[endpoint.name] = DeadlineError(f"did not join within {timeout_s:g} s", endpoint.name)
            except InflightError as error:
                failures[endpoint.name] = error

        await run_abandonable(self.sender.join, "inflight-join")
        async with asyncio.TaskGroup() as tasks:
            for endpoint, spec in specs.items():
                tasks.create_task(join(endpoint, spec))
        if len(specs) - len(failures) < num_needed:
            self.sender.abort()
            raise combine_failures([*failures.values()])
        return failures

    def lose(self) -> None:
        """Drop the group and end its pending calls. The next publish forms a new one. Any thread may call this."""
        self._members = frozenset()
        self.encoder.forget()  # it is no longer known which weights the endpoints hold
        self.sender.abort()

    def remove(self, endpoint: InferenceEndpoint) -> None:
        """Remove an endpoint that failed. The others continue to use the group."""
        self._members -= {endpoint}

    # ------------------------------------------------------------------------------------------------------ updates

    async def begin_update(self, update: WeightUpdate, timeout_s: float) -> WeightUpdate:
        """Prepare the sender once it has cleaned up the previous update. Return the update as it will be sent.

        The update becomes a delta if deltas are enabled and every member has kept the base. Raises `TransferError`.
        """
        ending, self._ending = self._ending, None
        if ending is not None:
            try:
                await asyncio.wait_for(asyncio.wrap_future(ending), timeout_s)
            except TimeoutError as error:
                raise TransferError(f"the previous update was not cleaned up within {timeout_s:g} s") from error
        if self.encoder.is_delta:
            update = await self._with_base(update)
        await run_abandonable(lambda: self.sender.begin(update), "inflight-begin")
        return update

    async def _with_base(self, update: WeightUpdate) -> WeightUpdate:
        """Return the update as a delta if every member has kept its base. Otherwise, return it unchanged."""
        base = self.encoder.base_of(update)
        if base is not None:
            calls = {e.name: partial(retry_unanswered, e.weight_version) for e in self._members}
            answers = await query_endpoints(calls)  # a silent endpoint is asked again, for the update itself
            kept = [answer.kept for answer in answers.values() if isinstance(answer, WeightVersion)]
            if kept == [base] * len(self._members):
                update = update.model_copy(update={"base": base, "encodings": ("delta",)})
        update = update.model_copy(update={"keep": True})
        self.encoder.begin(update)
        return update

    async def send(self, bucket: WeightBucket, timeout_s: float) -> None:
        """Send one bucket, and return when it has been sent. Raises `TransferError`."""
        await run_abandonable(partial(self.sender.send, bucket, timeout_s), "inflight-send")

    def end_update(self, update: WeightUpdate, *, is_applied_everywhere: bool) -> None:
        """Make the sender clean up the update in a thread. The next update waits for this.

        An endpoint that has not applied the update may still be reading it.
        """
        if is_applied_everywhere:
            self.encoder.note_applied(update.ref)
        self._ending = start_in_thread(lambda: self.sender.end(is_done=is_applied_everywhere), "inflight-end")

    def abort_update(self) -> None:
        """End the update as failed, and drop the group. Afterwards, raise any error from the sender."""
        try:
            self.sender.end(is_done=False)
        finally:
            self.lose()
