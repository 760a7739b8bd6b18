"""Level ``memory``: releasing and restoring the memory of the weights and of cached keys and values."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from inflight.base.tasks import cancel_and_wait
from inflight.conformance.checks import check, fail, look_at, require
from inflight.conformance.endpoint.aftermath import require_undisturbed, until_running
from inflight.conformance.endpoint.http import require_healthy
from inflight.conformance.endpoint.loras import SPEC as LORA
from inflight.conformance.endpoint.loras import make_lora, merge_lora
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.endpoint.waiting import SERVED_S, until, within
from inflight.conformance.reference import ReferenceWeights
from inflight.contracts import ReleasingEndpoint, ScoringEndpoint
from inflight.errors import BusyError, InflightError, ReleasedError, UnsupportedError
from inflight.wire import EndpointState, ScoreRequest

LEVEL = "memory"
_SEEN_LENGTH = 64
"""Length of a prompt that is sent again. Engines cache whole pages of 16 tokens or more."""
_MOVE_S = 60.0
"""Time limit for moving weights to the host, or back."""


@check("E-64")
@look_at("whether release_memory counts running and waiting requests atomically, so that none can arrive in between")
async def refused_while_busy(subject: EndpointSubject) -> None:
    """Memory is not released while requests run or wait, while an update is open, or where releasing it is not
    supported: the call is refused and disturbs nothing."""
    endpoint = subject.endpoint
    if not subject.capabilities.releases_memory:
        if isinstance(endpoint, ReleasingEndpoint):
            await subject.require_raises(endpoint.release_memory(), UnsupportedError, "an unsupported release")
        return
    running = await subject.start_running(2)
    async with _restored(subject.releasing):
        await subject.require_raises(subject.releasing.release_memory(), BusyError, "a release while requests run")
        await subject.require_state(EndpointState.READY, "after a release was refused")
        if subject.capabilities.max_concurrent_sequences > len(running):
            await subject.generate()
        await require_undisturbed(running, "a request that ran when a release was refused")
    await cancel_and_wait(*(task for _, task in running))
    if subject.capabilities.streaming:
        await until_running(subject, 0, SERVED_S, "cancelled requests still ran")
        await _require_refused_during_a_stream(subject)
    if subject.missing("updates") is None:
        await _require_refused_during_updates(subject)


async def _require_refused_during_a_stream(subject: EndpointSubject) -> None:
    """Require that memory is not released while only a stream runs, and that the stream continues."""
    request, chunks = subject.request(max_tokens=subject.remaining_tokens(), seed=78, stream=True), 0

    async def read() -> None:
        nonlocal chunks
        async for _ in subject.streaming.generate_stream(request):
            chunks += 1

    reading = subject.begin(read())
    await until(lambda: chunks, SERVED_S, "a stream yielded no token", [reading])
    async with _restored(subject.releasing):
        await subject.require_raises(subject.releasing.release_memory(), BusyError, "a release while a stream runs")
        seen = chunks
        await until(lambda: chunks > seen, SERVED_S, "after a refused release, a stream yielded no token", [reading])
    await cancel_and_wait(reading)


async def _require_refused_during_updates(subject: EndpointSubject) -> None:
    """Require that memory is not released while an update is open, and that the update can be completed."""
    publisher, weights = subject.publisher, subject.reference.weights
    await publisher.form_group()
    await until_running(subject, 0, SERVED_S, "cancelled requests still ran")
    for staged in (False, True) if subject.capabilities.staging else (False,):
        update = await publisher.request(weights, staged=staged)
        async with _restored(subject.releasing):
            what = f"a release while {'a staged' if staged else 'an'} update is open"
            await subject.require_raises(subject.releasing.release_memory(), BusyError, what)
        await publisher.complete(update, weights)


@check("E-65", "releases_memory updates", deadline_s=120)
@look_at("whether generate and request_weight_update check the state, and whether other clients can see it")
async def refuses_while_released(subject: EndpointSubject) -> None:
    """While memory is released, every client sees the state released and the version unchanged; requests raise
    ReleasedError, updates are refused, a weight group can be formed, and a repeated release changes nothing. /health
    responds with 200."""
    before = await subject.endpoint.weight_version()
    await subject.publisher.form_group()
    async with _restored(subject.releasing):
        for what in ("the release", "a repeated release"):
            answer = await within(_MOVE_S, subject.releasing.release_memory(), what)
            require(answer.state is EndpointState.RELEASED, f"{what} was answered with the state {answer.state}")
        for endpoint in (subject.endpoint, await subject.another_client()):
            found = await endpoint.weight_version()
            require(found.state is EndpointState.RELEASED, f"while memory is released, the state is {found.state}")
            require(found.version == before.version, f"the release changed version {before.version} to {found.version}")
            await subject.require_raises(
                endpoint.generate(subject.request()), ReleasedError, "a request while memory is released"
            )
        await require_nothing_answered(subject, ReleasedError, "while memory is released")
        if subject.opened.url is not None:
            await require_healthy(subject, EndpointState.RELEASED)
        update = subject.publisher.announcement(subject.reference.perturbed("B"))
        await subject.require_refused(
            subject.endpoint.request_weight_update(update), "an update while memory is released"
        )
        subject.publisher.lose_group()
        try:
            await subject.publisher.form_group()
        except InflightError as error:
            fail(f"no weight group could be formed while memory was released: {error}")
        await subject.require_state(EndpointState.RELEASED, "after a weight group was formed while memory was released")


async def require_nothing_answered(subject: EndpointSubject, error: type[InflightError], when: str) -> None:
    """Require that streams, chats and scores raise this error too."""
    can, endpoint = subject.capabilities, subject.endpoint

    async def stream() -> object:
        return [chunk async for chunk in subject.streaming.generate_stream(subject.request(stream=True))]

    calls: dict[str, Callable[[], Awaitable[object]]] = {}
    if can.streaming:
        calls["a stream"] = stream
    if can.chat:
        calls["a chat completion"] = lambda: endpoint.chat_completion(subject.chat_request())
    if can.scoring and isinstance(endpoint, ScoringEndpoint):
        scored = ScoreRequest(request_id=subject.request().request_id, token_ids=subject.prompt())
        calls["a score"] = lambda: endpoint.score(scored)
    for what, call in calls.items():
        await subject.require_raises(call(), error, f"{what} {when}")


@check("E-66", "releases_memory updates", deadline_s=120)
@look_at(
    "whether the last published weights are kept, whether cached prefixes are dropped, and to what a LoRA is added"
)
async def same_after_restore(subject: EndpointSubject) -> None:
    """Once memory is restored, the weights that were published last give the same tokens and logprobs as before, and
    updates work as before; a repeated restore changes nothing."""
    publisher, reference = subject.publisher, subject.reference
    published = reference.perturbed("B")
    base = await publisher.request(published, keep=True, session_id="base")
    await publisher.complete(base, published)
    prompt = subject.prompt(min(_SEEN_LENGTH, subject.context_len // 2))
    request, first = await subject.ask(prompt, temperature=0.0)
    served = await subject.endpoint.weight_version()
    async with _restored(subject.releasing):
        await within(_MOVE_S, subject.releasing.release_memory(), "the release")
        for call in ("the restore", "a repeated restore"):
            answer = await within(_MOVE_S, subject.releasing.restore_memory(), call)
            require(answer.state is EndpointState.READY, f"{call} was answered with the state {answer.state}")
            now, then = (answer.version, answer.run_id), (served.version, served.run_id)
            require(now == then, f"{call} was answered with version and run {now} after {then}")
    again = await subject.generate(request.prompt_token_ids, temperature=0.0)
    await subject.require_serves(published, "after memory was restored", prompt)
    require(
        again.token_ids == first.token_ids,
        f"sampled {first.token_ids} before the release and {again.token_ids} after it",
    )
    if "delta" in subject.capabilities.encodings and (await subject.endpoint.weight_version()).kept == base.ref:
        flipped = reference.with_final_norm(-1.0, "B with its final norm negated", published)
        delta = await publisher.request(flipped, encodings=("delta",), base=base.ref, session_id="delta")
        await publisher.send_all(delta, flipped, published)
        await publisher.commit(delta)
        await subject.require_serves(flipped, "after a delta to an update that was kept during the release")
    other = reference.with_final_norm(-1.0, "C")
    await publisher.publish(other, keep=True)
    await subject.require_serves(other, "after an update that followed the restore")
    if subject.capabilities.lora:
        await _release_with_a_lora(subject, other)


async def _release_with_a_lora(subject: EndpointSubject, base: ReferenceWeights) -> None:
    """Release and restore the memory while a LoRA is served; require that the LoRA and its base are unchanged."""
    publisher = subject.publisher
    first, second = make_lora(base, 1), make_lora(base, 2, (".o_proj",))
    await publisher.publish(first, lora=LORA)
    async with _restored(subject.releasing):
        await within(_MOVE_S, subject.releasing.release_memory(), "the release under a LoRA")
        await within(_MOVE_S, subject.releasing.restore_memory(), "the restore under a LoRA")
    await subject.require_serves(merge_lora(base, first), "after memory was restored under a LoRA")
    await publisher.publish(second, lora=LORA)
    await subject.require_serves(merge_lora(base, second), "after a LoRA of other layers that followed the restore")


@contextlib.asynccontextmanager
async def _restored(endpoint: ReleasingEndpoint) -> AsyncIterator[None]:
    """Restore the endpoint's memory on exit, even after an error."""
    try:
        yield
    finally:
        with contextlib.suppress(InflightError):
            await endpoint.restore_memory()
