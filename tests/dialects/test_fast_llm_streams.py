"""Fast-LLM's streams on a real Redis server: events without gaps, and samples in both of their forms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import torch
from hypothesis import given
from hypothesis import strategies as st

from inflight.dialects.fast_llm.events import (
    EVENTS,
    EventReader,
    TrainingFinished,
    WeightsReady,
    add_event,
)
from inflight.dialects.fast_llm.redis_streams import RedisStreams
from inflight.dialects.fast_llm.samples import SAMPLES, Document, SampleStream, document_of, fields_of, parse_document
from inflight.errors import ConfigError, InvalidRequestError, TransferError
from inflight.types import Rollout
from inflight.wire import VersionSpan
from tests.dialects.fast_llm_trainer import parse_sample
from tests.dialects.redis_server import running_redis
from tests.gates import SOON_S


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with running_redis(tmp_path_factory.mktemp("redis")) as port:
        yield port


@pytest.fixture
def client(port: int) -> Iterator[Any]:
    with redis.Redis(port=port) as client:
        client.flushall()
        yield client


@pytest.fixture
def streams(port: int, client: Any) -> Iterator[RedisStreams]:
    streams = RedisStreams(f"redis://127.0.0.1:{port}")
    yield streams
    streams.close()


# -------------------------------------------------------------------------------------------------------------- events


def test_a_reader_sees_what_is_added_after_it_was_created_and_nothing_earlier(streams: RedisStreams) -> None:
    add_event(streams, WeightsReady(step=90, documents_seen=900))
    add_event(streams, TrainingFinished())
    reader = EventReader(streams)
    with pytest.raises(TransferError, match=r"no event to fast_llm_events for 0\.01 s"):
        reader.next_event(0.01)
    told = [WeightsReady(step=0, documents_seen=0), WeightsReady(step=1, documents_seen=8), TrainingFinished()]
    for event in told:
        add_event(streams, event)
    assert [reader.next_event(SOON_S) for _ in told] == told


def test_an_event_is_written_as_fast_llm_writes_it(streams: RedisStreams, client: Any) -> None:
    add_event(streams, WeightsReady(step=3, documents_seen=96))
    add_event(streams, TrainingFinished())
    fields = [fields for _, fields in client.xrange(EVENTS)]
    assert [{key: json.loads(value) for key, value in it.items()} for it in fields] == [
        {b"event": {"type": "weights_ready", "step": 3, "documents_seen": 96}},
        {b"event": {"type": "training_finished"}},
    ]


def test_an_older_trainer_counts_versions_in_steps(streams: RedisStreams, client: Any) -> None:
    reader = EventReader(streams)
    client.xadd(EVENTS, {"event": '{"type": "weights_ready", "step": 4, "more": 1}'})
    event = reader.next_event(SOON_S)
    assert isinstance(event, WeightsReady) and event.version == 4


def test_many_events_at_once_are_all_read_in_order(streams: RedisStreams) -> None:
    reader = EventReader(streams)
    for step in range(50):
        add_event(streams, WeightsReady(step=step, documents_seen=step))
    assert [reader.next_event(SOON_S) for _ in range(50)] == [
        WeightsReady(step=step, documents_seen=step) for step in range(50)
    ]


@pytest.mark.parametrize("looks_between", [False, True])
def test_events_of_an_earlier_run_may_be_deleted_before_the_first_event(
    streams: RedisStreams, client: Any, looks_between: bool
) -> None:
    for step in (90, 91):  # in another millisecond than what follows, as ids count
        client.xadd(EVENTS, {"event": json.dumps({"type": "weights_ready", "step": step})}, id=f"1000-{step}")
    reader = EventReader(streams)
    client.delete(EVENTS)
    if looks_between:
        with pytest.raises(TransferError, match="no event"):
            reader.next_event(0.01)
    told = [WeightsReady(step=0), WeightsReady(step=1)]
    for event in told:
        add_event(streams, event)
    assert [reader.next_event(SOON_S) for _ in told] == told


def removed(client: Any, how: str, first_id: bytes) -> None:
    match how:
        case "trimmed":
            client.xtrim(EVENTS, maxlen=1, approximate=False)
        case "removed":
            client.xdel(EVENTS, first_id)
        case "deleted":
            client.delete(EVENTS)


@pytest.mark.parametrize("how", ["trimmed", "removed", "deleted"])
@pytest.mark.parametrize("num_read", [0, 2])
@pytest.mark.parametrize("num_earlier", [0, 3])
def test_a_gap_is_an_error(streams: RedisStreams, client: Any, how: str, num_read: int, num_earlier: int) -> None:
    for step in range(num_earlier):
        add_event(streams, WeightsReady(step=step))
    reader = EventReader(streams)
    for step in range(num_read):
        add_event(streams, WeightsReady(step=step))
        reader.next_event(SOON_S)
    first_id = client.xadd(EVENTS, {"event": '{"type": "weights_ready", "step": 10}'})
    client.xadd(EVENTS, {"event": '{"type": "weights_ready", "step": 11}'})
    removed(client, how, first_id)
    if how == "deleted" and num_read == 0:  # it looks like the deletion of an earlier run's events
        with pytest.raises(TransferError, match="no event"):
            reader.next_event(0.01)
        return
    with pytest.raises(TransferError, match="events were removed"):
        reader.next_event(SOON_S)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"event": "{"}, "JSON"),
        ({"event": '{"type": "pause"}'}, "type"),
        ({"event": '{"type": "weights_ready", "step": -1}'}, "step"),
        ({"event": '{"type": "weights_ready", "step": 1, "documents_seen": "many"}'}, "documents_seen"),
        ({"payload": "{}"}, "no field 'event'"),
        ({"event": '{"type": "training_finished", "x": "' + "y" * 70000 + '"}'}, "bytes"),
    ],
)
def test_an_event_that_cannot_be_read_is_an_error(
    streams: RedisStreams, client: Any, fields: dict[str, str], reason: str
) -> None:
    reader = EventReader(streams)
    client.xadd(EVENTS, fields)
    with pytest.raises(TransferError, match=reason):
        reader.next_event(SOON_S)


@pytest.mark.parametrize("second", [{"step": 5, "documents_seen": 50}, {"step": 6, "documents_seen": 49}])
def test_an_event_of_a_second_trainer_is_an_error(streams: RedisStreams, second: dict[str, int]) -> None:
    reader = EventReader(streams)
    add_event(streams, WeightsReady(step=5, documents_seen=50))
    reader.next_event(SOON_S)
    add_event(streams, WeightsReady.model_validate(second))
    with pytest.raises(TransferError, match="second trainer"):
        reader.next_event(SOON_S)


# ------------------------------------------------------------------------------------------------------ Redis itself


def test_errors_name_the_server_and_never_its_password() -> None:
    with pytest.raises(TransferError, match=r"Redis at 127\.0\.0\.1:9: .* failed") as caught:
        RedisStreams("redis://:secret@127.0.0.1:9").state(EVENTS)
    assert "secret" not in str(caught.value)
    for url in ("http://:secret@127.0.0.1", "redis://:secret@127.0.0.1:x", "redis://:secret@"):
        with pytest.raises(ConfigError, match="redis://") as refused:
            RedisStreams(url)
        assert "secret" not in str(refused.value)


# ------------------------------------------------------------------------------------------------------------- samples

LOGPROBS = st.floats(-50, 0, width=32)


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[Rollout, list[bool]]:
    """A rollout whose sampled turns alternate with observations, and a mask of its sampled tokens."""
    runs = draw(st.lists(st.tuples(st.integers(-1, 5), st.integers(1, 5)), min_size=1, max_size=6))
    versions = [version for version, length in runs for _ in range(length)]
    if max(versions) < 0:
        versions.append(0)
    spans, start = [], 0
    for end in range(1, len(versions) + 1):
        if end == len(versions) or versions[end] != versions[start]:
            if versions[start] >= 0:
                spans.append(VersionSpan(version=versions[start], start=start, end=end))
            start = end
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(versions), max_size=len(versions)))
    logprobs = [draw(LOGPROBS) if version >= 0 else 0.0 for version in versions]
    rollout = Rollout(
        prompt_token_ids=draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5)),
        completion_token_ids=tokens,
        behaviour_logprobs=logprobs,
        version_spans=spans,
        finish_reason="stop",
        reward=draw(st.floats(-10, 10)),
        temperature=1.0,
    )
    mask = [version >= 0 and draw(st.booleans()) for version in versions]
    if not any(mask):
        mask[versions.index(max(versions))] = True
    return rollout, mask


@given(rollouts(), st.floats(-10, 10))
def test_a_sample_is_read_by_fast_llm_as_it_was_sampled(sampled: tuple[Rollout, list[bool]], advantage: float) -> None:
    rollout, mask = sampled
    document = document_of(rollout, advantage=advantage, loss_mask=mask)
    found = parse_sample({key.encode(): value for key, value in fields_of(document).items()})
    num_prompt = len(rollout.prompt_token_ids)
    assert found["tokens"].tolist() == [*rollout.prompt_token_ids, *rollout.completion_token_ids]
    assert torch.equal(
        found["old_log_probabilities"], torch.tensor([0.0] * num_prompt + list(rollout.behaviour_logprobs))
    )
    assert found["model_version"].tolist() == [-1] * num_prompt + rollout.token_versions()
    is_trained = [True] * len(found["tokens"])
    for begin, end in found["loss_masking_spans"]:
        assert begin < end
        is_trained[begin:end] = [False] * (end - begin)
    assert is_trained == [False] * num_prompt + mask
    assert (found["advantage"], found["reward"]) == (advantage, rollout.reward)


@given(rollouts())
def test_both_forms_of_a_sample_are_parsed_to_the_same_document(sampled: tuple[Rollout, list[bool]]) -> None:
    document = document_of(sampled[0], advantage=0.5)
    assert document.old_logprobs is not None and document.model_versions is not None
    in_json = {  # as PipelineRL's preprocessor writes it
        "tokens": list(document.token_ids),
        "loss_masking_spans": document.loss_masking_spans,
        "old_log_probabilities": document.old_logprobs,
        "model_version": document.model_versions,
        "advantage": document.advantage,
        "reward": document.reward,
    }
    binary = parse_document({key.encode(): value for key, value in fields_of(document).items()})
    assert parse_document({b"data": json.dumps(in_json).encode()}) == binary
    assert (list(binary.token_ids), binary.old_logprobs) == (list(document.token_ids), document.old_logprobs)


def test_what_a_sample_does_not_have_is_left_out() -> None:
    document = parse_document({b"data": b'{"tokens": [1, 2], "advantage": 1}'})
    assert document == Document([1, 2], [], None, None, 1.0, None)
    assert fields_of(document).keys() == {"tokens", "data"}


@pytest.mark.parametrize(
    "fields",
    [
        {b"data": b"{"},
        {b"data": b"{}"},
        {b"tokens": b"1234567", b"data": b"{}"},
        {b"data": b'{"tokens": [1, 2], "model_version": [1]}'},
        {b"data": b'{"tokens": [1, 2], "loss_masking_spans": [[0, 3]]}'},
        {b"data": b'{"tokens": [1, 2], "loss_masking_spans": [[1, 1]]}'},
    ],
)
def test_a_sample_that_cannot_be_read_is_refused(fields: dict[bytes, bytes]) -> None:
    with pytest.raises(InvalidRequestError):
        parse_document(fields)


def test_a_rollout_that_cannot_be_trained_is_refused() -> None:
    rollout = Rollout([1], [2, 3], [-1.0, 0.0], [VersionSpan(version=0, start=0, end=1)], "stop", 1.0, 1.0)
    assert document_of(rollout, advantage=1.0).loss_masking_spans == [(0, 1), (2, 3)]
    for mask in ([False, False], [True], [True, True]):
        with pytest.raises(InvalidRequestError):
            document_of(rollout, advantage=1.0, loss_mask=mask)
    with pytest.raises(InvalidRequestError, match="finite"):
        document_of(rollout, advantage=float("nan"))


def test_samples_are_never_removed_unless_a_length_is_given(streams: RedisStreams, client: Any) -> None:
    document = parse_document({b"data": b'{"tokens": [1, 2], "advantage": 1}'})
    stream = SampleStream(streams)
    for _ in range(300):
        stream.write(document)
    assert client.xlen(SAMPLES) == 300
    SampleStream(streams, max_length=50).write(document)
    assert 50 <= client.xlen(SAMPLES) < 300
