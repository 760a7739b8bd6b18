"""The endpoint under check as the judge handles it: opened, restored before each check, and closed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from inflight.base.tasks import start
from inflight.conformance.checks import CheckFailed, CheckSkipped, fail
from inflight.conformance.endpoint.aftermath import require_left_usable
from inflight.conformance.endpoint.diagnosis import Diagnosis, diagnose, other_parameters
from inflight.conformance.endpoint.failing import install_failing_engine
from inflight.conformance.endpoint.opening import open_target
from inflight.conformance.endpoint.pace import measure_pace
from inflight.conformance.endpoint.publishing import SteppedPublisher
from inflight.conformance.endpoint.subject import ROUNDINGS, EndpointSubject
from inflight.conformance.endpoint.waiting import SLOWNESS, task_stacks
from inflight.conformance.judge import Hung, Subject
from inflight.conformance.targets import EndpointTarget
from inflight.wire import EndpointState

_READY_WAIT_S = 8.0
_IDLE_WAIT_S = 3.0
_TOKEN_WAIT_S = 15.0
_GONE_WAIT_S = 1.0
"""Shorter time limit for an endpoint that could not be restored last time."""
_CLEAN_UP_S = 8.0
_RESTORE_S = 15.0


class JudgedEndpoint(Subject):
    """Opens the target's endpoint and runs checks on it, in this process. Errors raised while opening it propagate.
    ``is_suspect`` indicates that an earlier check, in another process, may have harmed the endpoint."""

    def __init__(
        self,
        target: EndpointTarget,
        directory: Path,
        start_deadline_s: float,
        *,
        deadline_scale: float = 1.0,
        is_suspect: bool = False,
    ) -> None:
        self._target = target
        self._deadline_scale = deadline_scale
        self._start_deadline_s = start_deadline_s
        self._subject = EndpointSubject(target, directory, start_deadline_s)
        self._reference = self._subject.known_reference
        self._runner = asyncio.Runner()
        self._stack = contextlib.AsyncExitStack()
        self._unknown_weights = False
        self._is_suspect = is_suspect
        """Whether the previous check failed, so that the endpoint may be unable to generate."""
        self._diagnosis: Diagnosis | None = None
        """What the experiments showed, once a check of logprobs has failed."""
        self._gone: Exception | None = None
        """Why the last attempt to restore the endpoint failed."""
        try:
            self._runner.run(self._open())
        except BaseException:
            self._runner.close()
            raise

    @property
    def facts(self) -> Mapping[str, Any]:
        flags = {str(key): str(value) for key, value in self._target.options.items()}
        if self._reference is not None:
            flags["model"] = str(self._target.model or "the kit's own")
        capabilities, context_len = self._subject.capabilities, self._subject.context_len
        if context_len < capabilities.max_model_len:
            flags["context"] = f"checks sample up to {context_len} of {capabilities.max_model_len} tokens"
        return {
            "implementation": capabilities.engine,
            "implementation_version": capabilities.engine_version,
            "capabilities": capabilities.model_dump(mode="json"),
            "flags": flags,
            "tolerance": self._subject.tolerance,
            "slowness": round(self._subject.pace.slowness, 2),
        }

    @property
    def evidence(self) -> dict[str, Any]:
        return self._subject.evidence

    def missing(self, needs: tuple[str, ...]) -> str | None:
        return self._subject.missing(*needs)

    def prepare(self) -> None:
        """Return once the endpoint is READY and idle, and serves the checkpoint's weights.

        If an endpoint that the kit created cannot be restored, it is created again, once. If that also fails, later
        calls raise the same error immediately.
        """
        if self._gone is not None and self._target.url is None:
            raise self._gone
        try:
            self._runner.run(self._prepare())
        except Exception as error:
            self._gone = error
            raise
        self._gone = None

    def call(self, function: Callable[[Any], Any], deadline_s: float) -> None:
        try:
            self._runner.run(self._call(function, deadline_s))
        except CheckSkipped:
            raise
        except CheckFailed as failure:
            self._is_suspect = True
            if self._reference is None or "logprob" not in str(failure):
                raise
            raise CheckFailed(f"{failure}{self._diagnosed()}") from None
        except Exception:
            self._is_suspect = True
            raise

    def _diagnosed(self) -> str:
        """Return what experiments show about wrong logprobs, as the end of a message.

        The experiments run once, and only the first message states their result in full.
        """
        others = other_parameters(request.sampling for request in self._subject.asked)
        words = "as after the first such failure"
        if self._diagnosis is None:
            self._diagnosis = Diagnosis("")
            with contextlib.suppress(Exception):  # the endpoint is faulty
                self.prepare()
                self._diagnosis = self._runner.run(diagnose(self._subject))
            words = self._diagnosis.words
        if not self._diagnosis.words:
            return ""
        if others and self._diagnosis.is_right:
            words += f", or in how sampling parameters are applied: the check also requested {others}"
        return f". Experiments: {words}"

    def close(self) -> None:
        """Release everything. A server that the kit did not start serves the weights of its checkpoint again."""
        if self._target.url is not None and self._reference is not None and self._unknown_weights:
            with contextlib.suppress(Exception):
                self._runner.run(asyncio.wait_for(self._prepare(), _RESTORE_S))
        with contextlib.suppress(Exception):
            self._runner.run(asyncio.wait_for(self._stack.aclose(), _CLEAN_UP_S))
        with contextlib.suppress(Exception):
            self._runner.close()

    async def _open(self) -> None:
        subject, model = self._subject, None if self._reference is None else self._reference.path
        opening = open_target(self._target, model, subject.directory, self._start_deadline_s)
        subject.opened = await self._stack.enter_async_context(opening)
        self._stack.push_async_callback(subject.close_shared)
        async with asyncio.timeout(self._start_deadline_s):
            subject.can_fail = await install_failing_engine(subject.endpoint)
            subject.capabilities = await subject.endpoint.capabilities()
            version = await subject.endpoint.weight_version()
        if self._reference is not None:
            self._reference.cast(subject.capabilities.dtype)
            if subject.is_coarse and self._target.tolerance is None and not subject.rounding:
                prompt = subject.prompt(256, seed=1)[: subject.capabilities.max_model_len]
                subject.rounding = ROUNDINGS * self._reference.rounding(subject.capabilities.dtype, prompt)
        update_bytes = 0 if self._reference is None else self._reference.weights.size_bytes
        subject.pace = await measure_pace(partial(_generate, subject), subject.prompt, update_bytes)
        SLOWNESS.set(subject.pace.slowness * self._deadline_scale)
        self._unknown_weights = version.run_id is not None or version.version != 0

    async def _prepare(self) -> None:
        subject = self._subject
        try:
            await self._require_comes_back()
            await self._require_generates()
        except Exception:  # an adapter around a dead engine may raise anything
            if self._target.url is not None:
                raise
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._stack.aclose(), _CLEAN_UP_S)
            self._stack = contextlib.AsyncExitStack()
            await self._open()
            await self._require_generates()
        self._is_suspect = False
        served = (await subject.endpoint.weight_version()).version
        subject.publisher = SteppedPublisher(subject.endpoint, subject.capabilities, served)
        if self._reference is not None and self._unknown_weights:
            await subject.publisher.form_group(self._start_deadline_s / 6)  # more than a check allows: not judged
            await subject.publisher.publish(self._reference.weights)
            subject.publisher.lose_group()
            subject.publisher = SteppedPublisher(subject.endpoint, subject.capabilities, subject.publisher.version)
            self._unknown_weights = False

    async def _require_comes_back(self) -> None:
        """Return once the endpoint is READY and idle. Fail the check if that takes too long."""
        started = time.monotonic()
        patience_s = _READY_WAIT_S if self._gone is None else _GONE_WAIT_S
        while True:
            try:
                async with asyncio.timeout(patience_s):
                    version = await self._subject.endpoint.weight_version()
            except TimeoutError:
                fail(f"weight_version() did not return within {patience_s:g} s")
            waited_s = time.monotonic() - started
            is_ready = version.state is EndpointState.READY
            if is_ready and (version.num_running == 0 or (self._target.url and waited_s > _IDLE_WAIT_S)):
                return
            if version.state is EndpointState.POISONED or waited_s > (
                min(patience_s, _IDLE_WAIT_S) if is_ready else patience_s
            ):
                fail(f"before this check the endpoint was {version.state} with {version.num_running} requests running")
            await asyncio.sleep(0.01)

    async def _require_generates(self) -> None:
        """Require that a suspect endpoint samples a token, because its engine may be dead even if it reports READY."""
        if not self._is_suspect:
            return
        try:
            async with asyncio.timeout(_TOKEN_WAIT_S if self._gone is None else _GONE_WAIT_S):
                await self._subject.generate(max_tokens=1)
        except TimeoutError:
            fail("generate() returned no token in time")

    async def _call(self, function: Callable[[Any], Any], deadline_s: float) -> None:
        deadline_s *= self._subject.pace.slowness
        self._subject.asked.clear()
        subject, check = self._subject, start(function(self._subject))
        done, _ = await asyncio.wait([check], timeout=deadline_s)
        try:
            if not done:
                stacks = task_stacks()
                check.cancel()
                await asyncio.wait([check], timeout=_CLEAN_UP_S)
                raise Hung(
                    f"it did not end within its deadline of {deadline_s:g} s; --deadline-scale extends it", stacks
                )
        finally:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(subject.leave(), _CLEAN_UP_S)
            subject.publisher.lose_group()
            self._unknown_weights = self._unknown_weights or subject.publisher.touched
        try:
            check.result()
        except CheckSkipped:
            raise
        except BaseException:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(subject.close_shared(), _CLEAN_UP_S)
            raise
        await require_left_usable(subject)


async def _generate(subject: EndpointSubject, prompt: Sequence[int], num_tokens: int) -> None:
    await subject.generate(prompt, max_tokens=num_tokens)
