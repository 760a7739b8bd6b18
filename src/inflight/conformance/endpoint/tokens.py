"""Level tokens, what goes in and what comes out: ids, logprobs, refusals, and requests that run side by side."""

from __future__ import annotations

import asyncio
import math
import time

from inflight.conformance.checks import check, fail, require, skip
from inflight.conformance.endpoint.aftermath import until_running
from inflight.conformance.endpoint.repeats import require_repeated
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.errors import InvalidRequestError
from inflight.wire import Completion, EndpointState, GenerateRequest, check_spans

LEVEL = "tokens"
_GONE_S = 5.0
"""From the moment that a caller leaves to the moment that nothing of its request runs."""
_MOST_COMPLETIONS = 1024


@check(
    "E-10",
    needs=("model",),
    deadline_s=40,
    look_at="whether ids pass through text, whether a first token is added, and which step a logprob is read from",
)
async def ids_as_sent(subject: EndpointSubject) -> None:
    """The token ids of a prompt are used as they are: logprobs are those of the reference behind the same ids."""
    # Prompts that no text encodes to.
    prompts = [subject.prompt(length, seed=length) for length in (1, 2, 3, 12, 40)]
    prompts.append(tuple(range(subject.capabilities.vocab_size - 8, subject.capabilities.vocab_size)))
    prompts.append((subject.prompt(1, seed=5)[0],) * 9)
    for prompt in prompts:
        request = subject.request(prompt[: subject.capabilities.max_model_len - 8])
        completion = (await subject.endpoint.generate(request)).completions[0]
        gap = _difference(subject, request, completion)
        subject.note(**{f"logprob difference behind {len(prompt)} ids from {prompt[0]}": gap})
        require(
            gap <= subject.tolerance,
            f"behind the {len(prompt)} ids {list(prompt[:8])}, logprobs differ by up to {gap:.3g} from the reference's "
            f"(tolerance {subject.tolerance:g})",
        )


@check("E-11", look_at="how the answer is put together from what the engine reports")
async def one_logprob_per_token(subject: EndpointSubject) -> None:
    """Every sampled token is listed with one finite logprob and covered by a version span, under the request's id."""
    request = subject.request(n=3, max_tokens=32)
    response = await subject.endpoint.generate(request)
    version = (await subject.endpoint.weight_version()).version
    require(
        response.request_id == request.request_id, f"{request.request_id!r} was answered as {response.request_id!r}"
    )
    indexes = [completion.index for completion in response.completions]
    require(indexes == [0, 1, 2], f"completions of n=3 have the indexes {indexes}")
    for completion in response.completions:
        ids, logprobs = completion.token_ids, completion.logprobs
        require(len(ids) == 32, f"{len(ids)} tokens came back for max_tokens=32 without an end of sequence")
        require(len(logprobs) == len(ids), f"{len(ids)} tokens came with {len(logprobs)} logprobs")
        outside = [i for i in ids if not 0 <= i < subject.capabilities.vocab_size]
        require(not outside, f"token ids {outside[:4]} are outside of the vocabulary")
        wrong = [p for p in logprobs if not (math.isfinite(p) and p <= 0)]
        require(not wrong, f"{wrong[:4]} are no logarithms of probabilities")
        try:
            check_spans(completion.version_spans, len(ids))
        except ValueError as error:
            fail(str(error))
        versions = {span.version for span in completion.version_spans}
        require(versions == {version}, f"spans name versions {sorted(versions)}, version {version} is served")
        require(completion.finish_reason == "length", f"the finish reason is {completion.finish_reason!r}, not length")
    subject.note(completions=len(indexes), tokens=sum(len(c.token_ids) for c in response.completions))


@check(
    "E-22", deadline_s=60, look_at="where requests are tested: before the engine truncates them or looks them up by id"
)
async def refusals(subject: EndpointSubject) -> None:
    """A request that does not fit, or whose id is in use, is refused with InvalidRequestError and disturbs nothing."""
    longest, refusal = subject.capabilities.max_model_len, (InvalidRequestError,)
    num_tokens = min(300, longest - len(subject.prompt()))
    ((running, answer),) = await subject.start_running(1, max_tokens=num_tokens)
    twice = subject.request(max_tokens=4).model_copy(update={"request_id": running.request_id})
    await subject.require_raises(subject.endpoint.generate(twice), refusal, "the id of a running request, used again,")
    for length, max_tokens in ((longest, 1), (longest + 100, 1), (longest + 100, None), (12, longest), (12, 10**6)):
        call = subject.generate(subject.prompt(length), max_tokens=max_tokens)
        what = f"a prompt of {length} with max_tokens={max_tokens} in a context of {longest}"
        await subject.require_raises(call, refusal, what)
    await subject.require_state(EndpointState.READY, "after the refusals")
    completion = (await answer).completions[0]
    num_asked = running.sampling.max_tokens
    require(
        len(completion.token_ids) == num_asked,
        f"the request that ran beside the refusals has {len(completion.token_ids)} of {num_asked} tokens",
    )
    again = await subject.endpoint.generate(twice)
    subject.note(beside=len(completion.token_ids), served_again=len(again.completions[0].token_ids))
    require(len(again.completions[0].token_ids) == 4, "an id whose request had ended was not served anew")


@check(
    "E-25",
    deadline_s=60,
    look_at="whether a cancelled call or a closed connection aborts the request inside the engine",
)
async def a_caller_leaves(subject: EndpointSubject) -> None:
    """A request ends when its caller leaves: nothing of it runs a few seconds later."""
    # So many long completions that the request cannot have ended by itself.
    wanted = min(_MOST_COMPLETIONS, 4 * subject.capabilities.max_concurrent_sequences)
    ((_, answer),) = await subject.start_running(1, n=wanted)
    answer.cancel()
    await _require_idle(subject, "generate")
    if subject.capabilities.streaming:
        length = subject.capabilities.max_model_len - len(subject.prompt())
        request = subject.request(stream=True, n=wanted, max_tokens=length)

        async def read() -> None:
            async for _ in subject.streaming.generate_stream(request):
                pass

        reader = asyncio.ensure_future(read())
        while (await subject.endpoint.weight_version()).num_running == 0:
            require(not reader.done(), "a stream of thousands of tokens ended at once")
            await asyncio.sleep(0.005)
        reader.cancel()
        await asyncio.wait([reader])
        await _require_idle(subject, "generate_stream")


@check(
    "E-26",
    needs=("model",),
    deadline_s=60,
    look_at="the attention mask and positions of a batch, and how answers find their requests",
)
async def neighbours(subject: EndpointSubject) -> None:
    """Requests that run at once do not disturb one another: each gets its own answer, as if it were alone."""
    num_others = min(16, subject.capabilities.max_concurrent_sequences - 1)
    if num_others < 1:
        skip("one sequence runs at a time")
    prompts = [subject.prompt(length, seed=length) for length in (3, 12, 33)]
    alone = [await subject.generate(prompt, temperature=0.0, max_tokens=24) for prompt in prompts]
    others = await subject.start_running(num_others, max_tokens=160)
    requests = [subject.request(prompt, temperature=0.0, max_tokens=24) for prompt in prompts]
    responses = await asyncio.gather(*(subject.endpoint.generate(request) for request in requests))
    crowded = [response.completions[0] for response in responses]
    answered = [*zip(requests, responses, strict=True), *[(request, await task) for request, task in others]]
    largest = 0.0
    for request, response in answered:
        require(
            response.request_id == request.request_id, f"{request.request_id!r} was answered as {response.request_id!r}"
        )
        gap = _difference(subject, request, response.completions[0])
        largest = max(largest, gap)
        require(gap <= subject.tolerance, f"of {len(answered)} requests at once, one has logprobs {gap:.3g} off")
    subject.note(**{f"largest logprob difference of {len(answered)} requests at once": largest})
    require_repeated(subject, zip(alone, crowded, strict=True), "alone and beside others")


def _difference(subject: EndpointSubject, request: GenerateRequest, completion: Completion) -> float:
    """Return how far logprobs are from the reference's; the temperature is 0 or 1 and nothing is filtered."""
    reference = subject.reference
    expected = reference.logprobs(reference.weights, request.prompt_token_ids, completion.token_ids, request.sampling)
    return subject.difference(completion.logprobs, expected)


async def _require_idle(subject: EndpointSubject, call: str) -> None:
    left = time.monotonic()
    await until_running(subject, 0, _GONE_S, f"the request whose caller left {call} was still running")
    subject.note(**{f"seconds until idle, {call}": round(time.monotonic() - left, 3)})
