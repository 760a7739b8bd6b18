"""Teachers: models that score finished rollouts, and that the run neither trains nor samples from."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from inflight.base.backoff import Backoff
from inflight.base.tasks import finish_all, run_together
from inflight.contracts import InferenceEndpoint, ScoringEndpoint
from inflight.errors import ConfigError, EndpointError, InvalidRequestError, UnsupportedError
from inflight.http.kinds import connect_endpoint
from inflight.rollouts.driver_commands import ScoredGroup
from inflight.rollouts.mixture import task_of
from inflight.run.distillation_config import DistillationSection
from inflight.types import Rollout, TaskItem, TeacherScores
from inflight.wire import Needs, ScoreRequest, ScoreResponse

_QUIET_S = 30.0
"""How long further failures of a teacher are not reported after one has been reported."""
_MAX_PAUSE_S = 5.0
"""Longest pause between two attempts to score a completion."""


@dataclass(slots=True, eq=False)
class _Teacher:
    """A teacher with a URL, and a semaphore that limits how many completions it scores at a time."""

    endpoint: InferenceEndpoint
    slots: asyncio.Semaphore
    is_failing: bool = False
    """Whether the user has been notified that its scoring fails."""
    quiet_until: float = 0.0
    """The time until which further failures are not reported."""
    num_waiting: int = 0
    """Number of completions that the teacher has not scored yet."""


def short_context(name: str, has: int, needed: int) -> str:
    """Return the message for a teacher whose context is shorter than the sequences that it may have to score."""
    return (
        f"teacher {name} has a context of {has} tokens, but sequences of the run may have {needed}: lower "
        "train.max_tokens_per_micro_batch, or use another teacher"
    )


async def check_teacher(
    endpoint: InferenceEndpoint, settings: DistillationSection, vocab_size: int, context: int
) -> None:
    """Raise `ConfigError` unless a teacher can score sequences of up to ``context`` tokens of this vocabulary size."""
    can = await endpoint.capabilities()
    missing = can.missing(Needs(scoring=True, top_k=settings.top_k, vocab_size=vocab_size))
    if not missing and not isinstance(endpoint, ScoringEndpoint):
        missing = {"scoring": "scoring"}
    if missing:
        raise ConfigError(f"teacher {endpoint.name} does not support {'; '.join(missing.values())}")
    if can.max_model_len < context:
        raise ConfigError(short_context(endpoint.name, can.max_model_len, context))


class Teachers:
    """The teachers of a run, bound to one event loop. ``note`` shows messages to the user."""

    def __init__(self, settings: DistillationSection, token: str, note: Callable[[str], None]) -> None:
        self._settings = settings
        self._token = token
        self._note = note
        self._teachers: list[_Teacher | None] = []
        """An entry is None for a teacher whose logprobs the trainer ranks compute."""
        self._num_requests = 0

    @property
    def num_waiting(self) -> int:
        """Number of completions that wait for a teacher with a URL."""
        return sum(it.num_waiting for it in self._teachers if it is not None)

    async def connect(self, vocab_size: int, context: int) -> None:
        """Connect to the teachers.

        Raises `ConfigError` if one cannot score sequences of up to ``context`` tokens of this vocabulary size.
        """
        for it in self._settings.teachers:
            endpoint = None
            if it.url is not None:
                endpoint = connect_endpoint(it.url, token=self._token, generate_timeout_s=self._settings.timeout_s)
            slots = asyncio.Semaphore(self._settings.max_concurrent_scores)
            self._teachers.append(None if endpoint is None else _Teacher(endpoint, slots))
        endpoints = [it.endpoint for it in self._teachers if it is not None]
        await run_together(*(check_teacher(it, self._settings, vocab_size, context) for it in endpoints))

    async def scored(self, item: TaskItem, name: str, group: ScoredGroup) -> ScoredGroup:
        """Return the group with its teacher's scores; ``name`` is the name of the run's task or environment.

        Raises `EndpointError` if the teacher does not score one of the rollouts in time.
        """
        index = self._settings.teacher_of(task_of(item, name))
        if index is None:
            return group
        teacher = self._teachers[index]
        if teacher is None:
            scores: Sequence[TeacherScores] = [TeacherScores(teacher=index)] * len(group.rollouts)
        else:
            teacher.num_waiting += len(group.rollouts)
            try:
                scores = await run_together(*(self._scores(index, teacher, it) for it in group.rollouts))
            finally:
                teacher.num_waiting -= len(group.rollouts)
        taught = [replace(it, teacher=score) for it, score in zip(group.rollouts, scores, strict=True)]
        return replace(group, rollouts=taught)

    async def aclose(self) -> None:
        await finish_all(*(it.endpoint.aclose() for it in self._teachers if it is not None))

    async def _scores(self, index: int, teacher: _Teacher, rollout: Rollout) -> TeacherScores:
        if not rollout.completion_token_ids:
            return TeacherScores(teacher=index, logprobs=())
        if rollout.images:
            raise EndpointError("a teacher with a url cannot score images: use a teacher with a path", "")
        self._num_requests += 1
        request = ScoreRequest(
            request_id=f"teacher-{index}-{self._num_requests}",
            token_ids=(*rollout.prompt_token_ids, *rollout.completion_token_ids),
            start=len(rollout.prompt_token_ids),
            top_k=self._settings.top_k,
        )
        async with teacher.slots:
            response = await self._score(teacher, request)
        return TeacherScores(
            teacher=index,
            logprobs=response.logprobs,
            top_token_ids=response.top_token_ids,
            top_logprobs=response.top_logprobs,
        )

    async def _score(self, teacher: _Teacher, request: ScoreRequest) -> ScoreResponse:
        """Return the response to a request, which is retried until ``timeout_s`` has elapsed."""
        endpoint, timeout_s = teacher.endpoint, self._settings.timeout_s
        assert isinstance(endpoint, ScoringEndpoint)
        backoff, failure = Backoff(0.1, _MAX_PAUSE_S), ""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        response = await endpoint.score(request)
                    except (InvalidRequestError, UnsupportedError) as error:
                        raise EndpointError(f"the teacher refused to score a completion: {error}", "") from error
                    except EndpointError as error:
                        failure = str(error)
                    else:
                        if teacher.is_failing:
                            teacher.is_failing = False
                            self._note(f"teacher {endpoint.name} has recovered")
                        return response
                    if not teacher.is_failing and time.monotonic() >= teacher.quiet_until:
                        teacher.is_failing, teacher.quiet_until = True, time.monotonic() + _QUIET_S
                        self._note(
                            f"a teacher failed to score a completion; retrying for up to {timeout_s:g} s: {failure}"
                        )
                    await asyncio.sleep(backoff.next(time.monotonic()))
        except TimeoutError as error:
            why = failure or "no response"
            raise EndpointError(
                f"the teacher did not score a completion within distillation.timeout_s = {timeout_s:g} s: {why}",
                endpoint.name,
            ) from error
