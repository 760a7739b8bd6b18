"""What the clients of SGLang and vLLM make of a server whose weights others change. No engine: `labelled_servers`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from inflight.conformance.endpoint.forms import assembled
from inflight.contracts import InferenceEndpoint
from inflight.engines.detached_calls import AttachOnce
from inflight.engines.timings import LastUpdate
from inflight.engines.version_labels import began_under_another, label_of, parse_label
from inflight.errors import ConfigError, InvalidRequestError, PoisonedError, TransferError, UnauthorizedError
from inflight.weights.encode.buckets import plan_buckets
from inflight.wire import (
    ChatCompletionRequest,
    ChatMessage,
    Completion,
    DirectorySpec,
    EndpointState,
    GenerateRequest,
    InFlightPolicy,
    Manifest,
    SamplingParams,
    TensorSpec,
    UpdateRef,
    UpdateTimings,
    WeightUpdate,
)
from tests.engines.labelled_servers import FRESH, SERVERS, LabelledServer, LabelledVllm
from tests.gates import until

_serial = itertools.count()


@pytest.fixture(params=[*SERVERS, *(f"{name} streamed" for name in SERVERS)])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> LabelledServer:
    name, _, streamed = request.param.partition(" ")
    server = SERVERS[name](served_model(tmp_path))
    server.is_streamed = bool(streamed)
    return server


def served_model(directory: Path) -> Path:
    (directory / "config.json").write_text('{"vocab_size": 50}')
    save_file({"m.weight": torch.zeros(3, 2)}, directory / "model.safetensors")
    return directory


def run(server: LabelledServer, call: Callable[[InferenceEndpoint], Awaitable[None]]) -> None:
    """Run a coroutine on a client of the server."""

    async def main() -> None:
        async with server.served() as url, contextlib.aclosing(server.connect(url)) as client:
            client.is_streamed = server.is_streamed
            await call(client)

    asyncio.run(main())


async def sample(client: Any, n: int = 1) -> tuple[Completion, ...]:
    request = GenerateRequest(
        request_id=f"request-{next(_serial)}", prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=2, n=n)
    )
    if not getattr(client, "is_streamed", False):
        return (await client.generate(request)).completions
    chunks = [chunk async for chunk in client.generate_stream(request.model_copy(update={"stream": True}))]
    return tuple(assembled(index, [chunk for chunk in chunks if chunk.index == index]) for index in range(n))


def require_fresh(completions: tuple[Completion, ...], version: int) -> None:
    for completion in completions:
        assert set(completion.logprobs) == {FRESH}
        assert [span.version for span in completion.version_spans] == [version]


def test_prefixes_are_shared_under_one_version_and_not_beyond_whoever_published_it(server: LabelledServer) -> None:
    async def call(client: InferenceEndpoint) -> None:
        for version, label in enumerate(("default", "1/s@run", "2/t@run", "3/~u@run")):
            server.label = label
            for _ in range(3):
                require_fresh(await sample(client, n=2), version)
        assert len(server.computed) == 4

    run(server, call)


def test_a_version_that_is_published_again_shares_nothing_with_its_first_time(server: LabelledServer) -> None:
    async def call(client: InferenceEndpoint) -> None:
        for label in ("3/first@run", "3/second@run", "3/~a@run", "3/~b@run", "3/first@other"):
            server.label = label
            require_fresh(await sample(client), 3)

    run(server, call)


def test_what_waits_in_the_engine_while_weights_change_is_sampled_again_behind_a_prefix_of_its_own(
    server: LabelledServer,
) -> None:
    async def call(client: InferenceEndpoint) -> None:
        server.label = "1/s@run"
        await sample(client)

        def published_meanwhile() -> None:
            server.label, server.on_label = "2/s@run", None

        server.on_label = published_meanwhile
        num_before = server.num_sampled
        require_fresh(await sample(client, n=3), 2)
        assert server.num_sampled - num_before == 6

    run(server, call)


def test_however_often_weights_change_a_request_is_sampled_twice_at_most(server: LabelledServer) -> None:
    versions = itertools.count(1)

    def published_meanwhile() -> None:
        server.label = f"{next(versions)}/s@run"

    async def call(client: InferenceEndpoint) -> None:
        await client.capabilities()
        server.on_label = published_meanwhile
        for _ in range(3):
            num_before = server.num_sampled
            (completion,) = await sample(client)
            assert completion.logprobs == (FRESH, FRESH)
            assert server.num_sampled - num_before == 2

    run(server, call)


def test_weights_that_another_client_left_torn_are_refused_and_nothing_is_sampled(server: LabelledServer) -> None:
    async def call(client: InferenceEndpoint) -> None:
        require_fresh(await sample(client), 0)
        num_before = server.num_sampled
        server.label = "torn:1/s@run"
        with pytest.raises(PoisonedError):
            await sample(client)
        assert server.num_sampled == num_before
        server.label = "2/s@run"
        require_fresh(await sample(client), 2)

    run(server, call)


def test_a_server_that_another_client_paused_is_said_to_be_paused(server: LabelledServer) -> None:
    async def call(client: InferenceEndpoint) -> None:
        await sample(client)
        assert (await client.weight_version()).state is EndpointState.READY
        server.is_paused = True
        assert (await client.weight_version()).state is EndpointState.PAUSED

    run(server, call)


def test_a_client_says_which_session_of_another_brought_what_is_served(server: LabelledServer) -> None:
    async def call(client: InferenceEndpoint) -> None:
        for label, session_id in (("1/s@run", "s"), ("1/t@run", "t"), ("1/~x@run", ""), ("default", "")):
            server.label = label
            assert (await client.weight_version()).session_id == session_id

    run(server, call)


def test_what_vllm_keeps_as_the_base_of_a_delta_is_asked_when_a_group_is_formed(tmp_path: Path) -> None:
    server = LabelledVllm(served_model(tmp_path))
    group = DirectorySpec(run_id="run", transport="file", directory=str(tmp_path), timeout_s=5.0)

    async def call(client: InferenceEndpoint) -> None:
        for kept in (UpdateRef(run_id="run", version=1, session_id="s"), None):
            server.kept = kept
            await client.init_process_group(group)
            assert (await client.weight_version()).kept == kept

    run(server, call)


def announced(in_flight: InFlightPolicy) -> WeightUpdate:
    specs = (TensorSpec(name="m.weight", dtype="float32", shape=(3, 2)),)
    return WeightUpdate(
        run_id="run",
        version=1,
        manifest=Manifest(tensors=specs),
        buckets=plan_buckets(specs, 100),
        in_flight=in_flight,
        deadline_s=5.0,
        lease_s=5.0,
    )


def test_an_open_update_of_a_client_that_closes_leaves_vllm_sampling(tmp_path: Path) -> None:
    server = LabelledVllm(served_model(tmp_path))

    async def call(client: InferenceEndpoint) -> None:
        await client.init_process_group(
            DirectorySpec(run_id="run", transport="file", directory=str(tmp_path), timeout_s=5.0)
        )
        await client.request_weight_update(announced(InFlightPolicy.KEEP))

    run(server, call)
    assert "/resume" in server.asked[server.asked.index("/pause") :]


def test_the_first_token_is_measured_where_requests_wait_for_the_end_of_a_drain(server: LabelledServer) -> None:
    async def call(client: Any) -> None:
        await client.capabilities()
        client._engine.files = None  # of SGLang: nothing is loaded here
        update = announced(InFlightPolicy.DRAIN).model_copy(update={"staged": True})
        await client._engine.pause(update)
        sampling = asyncio.ensure_future(sample(client))
        await asyncio.sleep(0.05)
        await client._engine.apply(update)
        await sampling
        await until(lambda: client._engine.last.timings.first_token_s is not None)

    run(server, call)


def test_a_server_that_was_replaced_has_had_no_update(server: LabelledServer) -> None:
    async def call(client: Any) -> None:
        server.label = "1/s@run"
        await client.weight_version()
        client._engine.last.timings = timings = UpdateTimings(paused_s=1.0, load_s=0.5)
        assert (await client.weight_version()).last_update == timings
        server.label = "default"
        assert (await client.weight_version()).last_update is None

    run(server, call)


def test_a_key_that_is_refused_is_told_as_such(server: LabelledServer) -> None:
    async def call(client: InferenceEndpoint) -> None:
        server.is_locked = True
        with pytest.raises(UnauthorizedError, match="was refused with status 401"):
            await client.capabilities()
        server.is_locked = False
        assert (await client.capabilities()).model == "tiny"

    run(server, call)


def test_a_chat_completion_has_the_tokens_that_were_sampled_and_its_text_ends_before_a_stop_string(
    server: LabelledServer,
) -> None:
    server.rendered = [1, 2, 3]
    ask = ChatCompletionRequest(
        model="tiny", messages=(ChatMessage(role="user", content="Hello"),), n=2, max_tokens=3, logprobs=True
    )

    async def call(client: InferenceEndpoint) -> None:
        for stop, text in ((None, "<1><1><1>"), (">", "<1")):
            answer = await client.chat_completion(ask.model_copy(update={"stop": stop}))
            assert answer.prompt_token_ids == (1, 2, 3)
            assert answer.usage.total_tokens == 9
            for choice in answer.choices:
                assert (choice.message.content, choice.token_ids) == (text, (1, 1, 1))
                assert choice.logprobs is not None
                assert [piece.token for piece in choice.logprobs.content] == ["<1>"] * 3
                assert tuple(piece.logprob for piece in choice.logprobs.content) == choice.token_logprobs

    run(server, call)


def test_messages_that_render_to_nothing_and_models_that_are_not_served_are_refused(server: LabelledServer) -> None:
    messages = (ChatMessage(role="user", content=""),)

    async def call(client: InferenceEndpoint) -> None:
        for model, says in (
            ("tiny", "prompt_token_ids"),
            ("other", "'other' is not served by this server; the served model is 'tiny'"),
        ):
            with pytest.raises(InvalidRequestError, match=says):
                await client.chat_completion(ChatCompletionRequest(model=model, messages=messages, max_tokens=1))

    run(server, call)


def test_attaching_is_shared_and_repeated_after_it_failed_or_was_cancelled() -> None:
    outcomes: list[BaseException | None] = [asyncio.CancelledError(), ConfigError("not yet"), None]
    tried: list[BaseException | None] = []

    async def attach() -> int:
        tried.append(outcome := outcomes.pop(0))
        await asyncio.sleep(0)
        if outcome is not None:
            raise outcome
        return len(tried)

    async def main() -> None:
        attaching = AttachOnce(attach)
        for error in (asyncio.CancelledError, ConfigError):
            with pytest.raises(error):
                await attaching.result()
            assert not attaching.has_succeeded
        assert await asyncio.gather(attaching.result(), attaching.result()) == [3, 3]
        assert attaching.has_succeeded

    asyncio.run(main())


def test_the_first_token_of_an_update_is_not_told_of_the_next() -> None:
    async def main() -> None:
        last = LastUpdate()
        first, second = UpdateTimings(paused_s=1.0, load_s=0.5), UpdateTimings(paused_s=2.0, load_s=0.5)
        last.timings = first
        await last.note_first_token(first, asyncio.sleep(0), time.monotonic())
        assert last.timings is not None and last.timings.first_token_s is not None
        last.timings = second
        await last.note_first_token(first, asyncio.sleep(0), time.monotonic())
        assert last.timings is second

    asyncio.run(main())


def test_labels_say_what_they_were_made_of_and_no_two_updates_share_one() -> None:
    named = UpdateRef(run_id="a@b/c", version=7, session_id="s.1-_")
    unnamed = named.model_copy(update={"session_id": ""})
    for ref in (named, unnamed):
        for torn in (False, True):
            served = parse_label(label_of(ref, torn=torn))
            assert (served.run_id, served.version, served.session_id) == (ref.run_id, ref.version, ref.session_id)
            assert served.torn is torn
    assert label_of(unnamed) != label_of(unnamed)
    assert label_of(named) != label_of(named.model_copy(update={"session_id": "s.2"}))
    assert parse_label("7@run").version == 7


def test_a_completion_without_tokens_began_under_no_label() -> None:
    assert not began_under_another(None, "default")
    assert not began_under_another([{"version": "1/s@run", "start": 0, "end": 0}], "default")


class JoiningVllm(LabelledVllm):
    """The join of its first group never ends, as of a worker that cannot reach a store which is gone."""

    num_joins = 0

    def answer(self, path: str, body: Any) -> Any:
        self.num_joins += path == "/init_weight_transfer_engine"
        found = super().answer(path, body)
        if path == "/collective_rpc" and self.num_joins == 1:
            found["results"][0]["phase"] = "busy"
        return found


def test_a_join_that_waits_for_nobody_ends_when_the_next_one_comes(tmp_path: Path) -> None:
    server = JoiningVllm(served_model(tmp_path))
    spec = DirectorySpec(run_id="run", transport="file", directory=str(tmp_path), timeout_s=60)

    async def call(client: InferenceEndpoint) -> None:
        first = asyncio.ensure_future(client.init_process_group(spec))
        await until(lambda: server.num_joins == 1)
        async with asyncio.timeout(10):
            # The second waits for its turn: if it had one, its own publisher would have gone meanwhile.
            later = [asyncio.ensure_future(client.init_process_group(spec.model_copy())) for _ in range(2)]
            await later[1]
            for given_up in (first, later[0]):
                with pytest.raises(TransferError, match=r"abandoned: .* joining another"):
                    await given_up
        assert server.num_joins == 2

    run(server, call)
