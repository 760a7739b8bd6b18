"""Level ``discovery``: whether an endpoint's capabilities are complete and correct, and whether it refuses what they do
not include."""

from __future__ import annotations

import asyncio
from typing import Any

from inflight.base.tasks import cancel_and_wait
from inflight.conformance.checks import check, fail, look_at, require
from inflight.conformance.endpoint.aftermath import require_right_logprobs, require_undisturbed, until_running
from inflight.conformance.endpoint.needs import ENCODINGS, STORES
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.reference import ReferenceWeights
from inflight.contracts import StreamingEndpoint
from inflight.errors import InvalidRequestError, UnsupportedError, UpdateRefusedError
from inflight.wire import (
    PROTOCOL_VERSION,
    DirectorySpec,
    EndpointState,
    GenerateRequest,
    GenerateResponse,
    HttpFileSpec,
    InFlightPolicy,
    IpcSpec,
    TransportSpec,
    UpdateRef,
)

LEVEL = "discovery"
_GROUPS = ("gloo", "nccl")
_NUM_REQUESTS = 40
"""Number of requests sent at the same time to fill an endpoint, with several completions each."""
_MOST_COMPLETIONS = 16
"""Maximum number of completions of each request. An endpoint that can run more than `_NUM_REQUESTS` times as many
sequences is not filled."""
_LARGEST_N = 1024
"""The largest n that a request may have."""
_SOON_S = 5.0


@check("E-01", look_at="whether capabilities() returns constants instead of the current state")
async def constant_capabilities(subject: EndpointSubject) -> None:
    """The reported capabilities state this protocol version, name an in-flight policy and a transport, and never
    change."""
    first = await subject.endpoint.capabilities()
    await subject.generate()
    if subject.missing("updates") is None and {"gloo", "nccl"} & set(first.transports):
        await subject.publisher.publish(subject.reference.weights)
    for asked in (subject.capabilities, await subject.endpoint.capabilities()):
        changed = [name for name, value in first if value != getattr(asked, name)]
        require(not changed, f"the capabilities changed from one call to the next: {', '.join(changed)}")
    subject.note(
        protocol_version=first.protocol_version, policies=first.in_flight_policies, transports=first.transports
    )
    require(
        first.protocol_version == PROTOCOL_VERSION,
        f"protocol version {first.protocol_version} is reported, the kit's is {PROTOCOL_VERSION}",
    )
    require(first.in_flight_policies, "no in-flight policy is reported")
    require(first.transports, "no transport is reported")


@check("E-02")
@look_at(
    "whether vocab_size counts the rows of the head or the entries of the tokenizer, and what validates prompt ids"
)
async def vocabulary(subject: EndpointSubject) -> None:
    """Every token id below the reported vocab_size is accepted in a prompt, and vocab_size itself is refused."""
    vocab_size = subject.capabilities.vocab_size
    completion = await subject.generate((*subject.prompt(4), vocab_size - 1))
    subject.note(vocab_size=vocab_size, tokens=completion.token_ids)
    require(max(completion.token_ids) < vocab_size, f"id {max(completion.token_ids)} of {vocab_size} was sampled")
    call = subject.generate((*subject.prompt(4), vocab_size))
    await subject.require_raises(call, InvalidRequestError, f"token id {vocab_size} of a vocabulary of {vocab_size}")
    await subject.generate()


@check(
    "E-03", deadline_s=60, look_at="off-by-one in the longest sequence: does the engine reserve a position for itself?"
)
async def context_length(subject: EndpointSubject) -> None:
    """A prompt and max_tokens that fill the reported max_model_len are served, with correct logprobs up to the last
    token, and one more token is refused.

    Where such a prompt would take minutes, a shorter one is served.
    """
    longest, num_tokens = subject.capabilities.max_model_len, 12
    prompt = subject.prompt(max(1, longest - num_tokens))
    num_tokens = longest - len(prompt)
    is_whole = subject.pace.allows_prompt(len(prompt))
    served = prompt if is_whole else prompt[: subject.context_len - num_tokens]
    request, completion = await subject.ask(served, max_tokens=num_tokens)
    if not is_whole:
        why = "because a whole prompt would take minutes"
        subject.note(part_of_context=f"a prompt of {len(served)} of {len(prompt)} tokens, {why}")
    subject.note(max_model_len=longest, prompt=len(served), tokens=len(completion.token_ids))
    num_sampled = len(completion.token_ids)
    words = f"after a prompt of {len(served)} tokens, {num_sampled} of {num_tokens} tokens were sampled"
    require(num_sampled == num_tokens, words)
    if not subject.is_coarse:  # in 16 bits, half of so few tokens may round too much
        require_right_logprobs(subject, request, completion, f"the last {num_tokens} tokens of the context")
    call = subject.generate(prompt, max_tokens=num_tokens + 1)
    what = f"a prompt of {len(prompt)} and max_tokens={num_tokens + 1} in a context of {longest}"
    await subject.require_raises(call, InvalidRequestError, what)


@check("E-04", "updates", deadline_s=40)
@look_at("where request_weight_update checks the policy: it must do so before the state changes")
async def unsupported_policies(subject: EndpointSubject) -> None:
    """An update under an in-flight policy that is not supported is refused before anything is paused."""
    undeclared = [policy for policy in InFlightPolicy if policy not in subject.capabilities.in_flight_policies]
    subject.note(undeclared=undeclared)
    if not undeclared:
        return
    running = await subject.start_running(1)
    await subject.publisher.form_group()
    for policy in undeclared:
        update = subject.publisher.announcement(subject.reference.perturbed("B"), in_flight=policy)
        call = subject.endpoint.request_weight_update(update)
        what = f"an update under {policy}, which is not supported,"
        await subject.require_raises(call, (UnsupportedError, UpdateRefusedError), what)
        await subject.require_state(EndpointState.READY, f"after {policy} was refused")
        await require_undisturbed(running, f"a request that ran when {policy} was refused")
    await subject.require_serves(subject.reference.weights, "after the refusals")


@check("E-05", "updates", deadline_s=40, look_at="whether init_process_group checks the transport before it joins")
async def unsupported_transports(subject: EndpointSubject) -> None:
    """A weight group over a transport that is not supported is refused with UnsupportedError."""
    undeclared = [t for t in (*_GROUPS, *STORES) if t not in subject.capabilities.transports]
    subject.note(undeclared=undeclared)
    for transport in undeclared:
        run_id = subject.publisher.run_id
        spec: TransportSpec
        if transport == "http":
            spec = HttpFileSpec(run_id=run_id, transport="http", url="http://127.0.0.1:9", token="none", timeout_s=3.0)
        elif transport == "ipc":
            directory = str(subject.directory)
            spec = IpcSpec(run_id=run_id, transport="ipc", directory=directory, place="none", timeout_s=3.0)
        elif transport in STORES:
            fields = {"run_id": run_id, "transport": transport, "directory": str(subject.directory), "timeout_s": 3.0}
            spec = DirectorySpec.model_validate(fields)
        else:
            spec = subject.publisher.open_group(timeout_s=3.0).model_copy(update={"transport": transport})
        call = subject.endpoint.init_process_group(spec)
        await subject.require_raises(call, UnsupportedError, f"a group over {transport}, which is not supported,")
        await subject.require_state(EndpointState.READY, f"after {transport} was refused")
        await subject.generate()


@check("E-09", "updates", look_at="whether request_weight_update checks every field of an update and ignores none")
async def unsupported_updates(subject: EndpointSubject) -> None:
    """Where staging, an encoding, partial updates or several senders are not supported, an update that uses them is
    refused before anything is paused."""
    capabilities, publisher = subject.capabilities, subject.publisher
    other = subject.reference.perturbed("B")
    rest = ReferenceWeights("all but the first", dict(list(other.tensors.items())[1:]))
    asked: dict[str, tuple[ReferenceWeights, dict[str, Any]]] = {}
    if not capabilities.staging:
        asked["staging"] = (other, {"staged": True})
    for encoding in ENCODINGS:
        if encoding not in capabilities.encodings:
            base = UpdateRef(run_id=publisher.run_id, version=0) if encoding == "delta" else None
            asked[f"encoding {encoding}"] = (other, {"encodings": (encoding,), "base": base})
    if not capabilities.partial_updates:
        asked["frozen tensors"] = (rest, {"frozen": tuple(other.tensors)[:1]})
    subject.note(undeclared=[*asked, *(() if capabilities.sharded else ("several senders",))])
    if not capabilities.sharded:
        several = subject.another_publisher(num_senders=2)
        refusals = (UnsupportedError, UpdateRefusedError, InvalidRequestError)
        await subject.require_raises(
            several.request(other), refusals, "an update of several senders, unsupported here,"
        )
        await subject.require_state(EndpointState.READY, "after several senders were refused")
    if not asked:
        return
    await publisher.form_group()
    for what, (weights, fields) in asked.items():
        call = subject.endpoint.request_weight_update(publisher.announcement(weights, **fields))
        update = f"an update with {what}, unsupported here,"
        await subject.require_raises(call, (UnsupportedError, UpdateRefusedError), update)
        await subject.require_state(EndpointState.READY, f"after {what} was refused")
    await subject.require_serves(subject.reference.weights, "after the refusals")


@check("E-06", look_at="whether the flags chat and streaming agree with what the methods do")
async def chat_and_streaming(subject: EndpointSubject) -> None:
    """Chat and streaming are served where they are supported, and refused with UnsupportedError where they are not."""
    endpoint, has_chat, has_streaming = subject.endpoint, subject.capabilities.chat, subject.capabilities.streaming

    async def chat() -> object:
        return (await endpoint.chat_completion(subject.chat_request())).choices[0].token_ids

    async def stream() -> object:
        chunks = subject.streaming.generate_stream(subject.request(stream=True))
        return [token async for chunk in chunks for token in chunk.token_ids]

    async def chat_stream() -> object:
        chunks = subject.streaming.chat_completion_stream(subject.chat_request(stream=True))
        return [token async for chunk in chunks for choice in chunk.choices for token in choice.token_ids]

    cases = [("a chat completion", has_chat, chat)]
    if has_streaming or isinstance(endpoint, StreamingEndpoint):
        cases += [("a stream", has_streaming, stream), ("a chat stream", has_chat and has_streaming, chat_stream)]
    for what, is_declared, tokens in cases:
        if is_declared:
            require(await tokens(), f"{what} is reported as supported, but carried no token")
        else:
            await subject.require_raises(tokens(), UnsupportedError, f"{what}, which is not supported,")
    subject.note(chat=has_chat, streaming=has_streaming)


@check("E-07", deadline_s=60, look_at="num_running: it counts sequences, not requests, and decreases when they end")
async def state_at_rest(subject: EndpointSubject) -> None:
    """When idle, an endpoint is READY and runs no sequence. While sequences run, num_running is their number."""
    found = await subject.endpoint.weight_version()
    subject.note(at_rest=found.model_dump(mode="json", exclude_none=True))
    require(found.state is EndpointState.READY, f"at rest, the state is {found.state}, not ready")
    require(found.updating_to is None, f"at rest, an update to version {found.updating_to} is reported as open")
    require(
        found.run_id is not None or (found.version == 0 and found.last_update is None),
        f"version {found.version} is served, last updated {found.last_update}, but no run_id names its run",
    )
    require(found.num_running == 0, f"at rest, num_running is {found.num_running}")
    num_each = 2 if subject.capabilities.max_concurrent_sequences >= 4 else 1
    num_requests = min(2, subject.capabilities.max_concurrent_sequences)
    running = await subject.start_running(num_requests, n=num_each, max_tokens=min(200, subject.remaining_tokens()))
    largest = await _largest_num_running(subject, asyncio.gather(*(task for _, task in running)))
    subject.note(sequences=num_each * num_requests, largest_num_running=largest)
    words = f"while {num_requests} requests with n={num_each} ran, num_running was at most {largest}"
    require(largest == num_each * num_requests, words)
    await until_running(subject, 0, _SOON_S, "after the last answer, sequences were still reported as running")
    if subject.capabilities.streaming:
        request = subject.request(max_tokens=subject.remaining_tokens(), seed=77, stream=True)
        reading = subject.begin(_read(subject, request))
        await until_running(
            subject, 1, _SOON_S, "while a stream ran, another number of sequences was reported as running"
        )
        await cancel_and_wait(reading)


@check("E-08", deadline_s=60)
@look_at("the queue in front of the engine: it must neither refuse requests nor run more sequences than are reported")
async def more_than_fit(subject: EndpointSubject) -> None:
    """Sequences beyond max_concurrent_sequences wait for their turn, and all of them are completed in full."""
    reported, num_tokens = subject.capabilities.max_concurrent_sequences, 24
    wanted = reported + max(8, reported // 4)
    num_each = min(_MOST_COMPLETIONS, -(-wanted // _NUM_REQUESTS))
    num_requests = min(_NUM_REQUESTS, -(-wanted // num_each))
    requests = [
        subject.request(subject.prompt(seed=i), n=num_each, seed=i, max_tokens=num_tokens) for i in range(num_requests)
    ]
    answers = asyncio.gather(*(subject.endpoint.generate(request) for request in requests))
    largest = await _largest_num_running(subject, answers)
    subject.note(max_concurrent_sequences=reported, asked_for=num_requests * num_each, largest_num_running=largest)
    require(largest <= reported, f"{largest} sequences ran at the same time, but {reported} are reported")
    for request, response in zip(requests, answers.result(), strict=True):
        require(
            response.request_id == request.request_id,
            f"request {request.request_id} was answered under the id {response.request_id}",
        )
        lengths = [len(completion.token_ids) for completion in response.completions]
        require(
            lengths == [num_tokens] * num_each, f"{num_each} completions of {num_tokens} tokens have lengths {lengths}"
        )
        if request in (requests[0], requests[-1]):
            for completion in response.completions[-2:]:
                require_right_logprobs(subject, request, completion, "a request beyond those that fit")
    if reported < _LARGEST_N:
        request = subject.request(n=reported + 1, max_tokens=4)
        lengths = [len(it.token_ids) for it in (await subject.endpoint.generate(request)).completions]
        require(lengths == [4] * request.sampling.n, f"n={request.sampling.n} of 4 tokens have the lengths {lengths}")


async def _read(subject: EndpointSubject, request: GenerateRequest) -> None:
    async for _ in subject.streaming.generate_stream(request):
        pass


async def _largest_num_running(subject: EndpointSubject, answers: asyncio.Future[list[GenerateResponse]]) -> int:
    """Return the maximum number of running sequences that the endpoint reported before all answers had arrived."""
    largest = 0
    while not answers.done():
        largest = max(largest, (await subject.endpoint.weight_version()).num_running)
        await asyncio.wait([answers], timeout=0.01)
    if (failure := answers.exception()) is not None:
        fail(f"a request was not answered: {type(failure).__name__}: {failure}")
    return largest
