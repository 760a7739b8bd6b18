"""Wire messages: what they refuse, and that they survive JSON."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from inflight import wire
from inflight.base.requirements import require
from inflight.errors import UnsupportedError
from inflight.weights.encode.buckets import plan_buckets
from inflight.wire import (
    BucketSpec,
    Capabilities,
    ChatCompletionRequest,
    ChatMessage,
    Completion,
    CompletionChunk,
    GenerateRequest,
    GenerateResponse,
    InFlightPolicy,
    Manifest,
    Needs,
    SamplingParams,
    TensorSpec,
    VersionSpan,
    WeightUpdate,
    WireModel,
    check_spans,
)


def completion(**fields: Any) -> Completion:
    values = {
        "index": 0,
        "token_ids": (1, 2, 3),
        "logprobs": (-1.0, -2.0, -3.0),
        "version_spans": (VersionSpan(version=0, start=0, end=3),),
        "finish_reason": "stop",
    }
    return Completion.model_validate({**values, **fields})


def spans(*triples: tuple[int, int, int]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(version=v, start=s, end=e) for v, s, e in triples)


# ---------------------------------------------------------------------------------------------------------------
# Spans and completions


@pytest.mark.parametrize(
    ("triples", "num_tokens"),
    [((), 0), (((0, 0, 3),), 3), (((0, 0, 1), (1, 1, 2), (5, 2, 9)), 9), (((3, 0, 2), (1, 2, 4), (3, 4, 5)), 5)],
)
def test_spans_that_cover_all_tokens_are_taken(triples: tuple[tuple[int, int, int], ...], num_tokens: int) -> None:
    check_spans(spans(*triples), num_tokens)


@pytest.mark.parametrize(
    ("triples", "num_tokens", "words"),
    [
        ((), 1, "cover 1 tokens"),
        (((0, 0, 3),), 0, "cover 0 tokens"),
        (((0, 0, 3),), 4, "cover 4 tokens"),
        (((0, 0, 3),), 2, "cover 2 tokens"),
        (((0, 1, 3),), 3, "cover 3 tokens"),
        (((0, 0, 1), (1, 2, 3)), 3, "cover 3 tokens"),
        (((0, 0, 2), (1, 1, 3)), 3, "cover 3 tokens"),
        (((1, 2, 3), (0, 0, 2)), 3, "cover 3 tokens"),
        (((0, 0, 1), (0, 1, 3)), 3, "same version"),
    ],
)
def test_spans_with_a_gap_an_overlap_or_a_needless_edge_are_refused(
    triples: tuple[tuple[int, int, int], ...], num_tokens: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        check_spans(spans(*triples), num_tokens)


@pytest.mark.parametrize(("start", "end"), [(0, 0), (3, 3), (3, 2), (-1, 2)])
def test_an_empty_span_is_refused(start: int, end: int) -> None:
    with pytest.raises(ValidationError):
        VersionSpan(version=0, start=start, end=end)


def test_a_completion_whose_parts_differ_in_length_is_refused() -> None:
    with pytest.raises(ValidationError, match="2 logprobs were given for 3 tokens"):
        completion(logprobs=(-1.0, -2.0))
    with pytest.raises(ValidationError, match="do not cover 3 tokens"):
        completion(version_spans=spans((0, 0, 2)))
    with pytest.raises(ValidationError, match="finish_reason"):
        completion(finish_reason="tired")
    assert completion(token_ids=(), logprobs=(), version_spans=(), finish_reason="abort").token_ids == ()


@given(cuts=st.sets(st.integers(1, 49), max_size=12), num_tokens=st.integers(50, 60), data=st.data())
def test_any_cut_into_versions_is_taken_and_any_change_of_an_edge_refused(
    cuts: set[int], num_tokens: int, data: st.DataObject
) -> None:
    edges = [0, *sorted(cuts), num_tokens]
    good = [(version, edges[version], edges[version + 1]) for version in range(len(edges) - 1)]
    check_spans(spans(*good), num_tokens)
    which = data.draw(st.integers(0, len(good) - 1))
    shift = data.draw(st.sampled_from([-1, 1]))
    version, start, end = good[which]
    if end + shift > start:
        moved = [*good[:which], (version, start, end + shift), *good[which + 1 :]]
        with pytest.raises(ValueError, match="do not cover"):
            check_spans(spans(*moved), num_tokens)


# ---------------------------------------------------------------------------------------------------------------
# Manifests and buckets

MANIFEST = Manifest(tensors=tuple(TensorSpec(name=n, dtype="float32", shape=(2, 3)) for n in "abc"))


def update(buckets: list[tuple[int, int, int, int]], **fields: Any) -> WeightUpdate:
    values = {
        "run_id": "run",
        "version": 1,
        "manifest": MANIFEST,
        "buckets": tuple(BucketSpec(index=i, start=a, stop=b, size_bytes=n) for i, a, b, n in buckets),
        "in_flight": "keep",
        "deadline_s": 1.0,
        "lease_s": 2.0,
    }
    return WeightUpdate.model_validate({**values, **fields})


def test_buckets_that_cover_the_manifest_are_taken() -> None:
    assert update([(0, 0, 3, 72)]).ref == wire.UpdateRef(run_id="run", version=1)
    assert len(update([(0, 0, 1, 24), (1, 1, 3, 48)]).buckets) == 2


@pytest.mark.parametrize(
    ("buckets", "words"),
    [
        ([], "at least 1"),
        ([(0, 0, 2, 48)], "without gap"),
        ([(0, 0, 4, 96)], "without gap"),
        ([(0, 1, 3, 48)], "without gap"),
        ([(0, 0, 1, 24), (1, 2, 3, 24)], "without gap"),
        ([(0, 0, 2, 48), (1, 1, 3, 48)], "without gap"),
        ([(1, 1, 3, 48), (0, 0, 1, 24)], "without gap"),
        ([(0, 0, 1, 24), (2, 1, 3, 48)], "without gap"),
        ([(0, 0, 1, 24), (1, 1, 1, 0), (2, 1, 3, 48)], "without gap"),
        ([(0, 0, 3, 71)], "bucket 0 announces 71 bytes, but its tensors have 72"),
        ([(0, 0, 1, 24), (1, 1, 3, 72)], "bucket 1 announces 72 bytes, but its tensors have 48"),
    ],
    ids=str,
)
def test_buckets_that_do_not_cover_the_manifest_are_refused(
    buckets: list[tuple[int, int, int, int]], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        update(buckets)


@pytest.mark.parametrize("fields", [{"deadline_s": 0}, {"lease_s": -1}, {"run_id": ""}, {"version": -1}], ids=str)
def test_an_update_without_deadline_lease_or_owner_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(fields))):
        update([(0, 0, 3, 72)], **fields)


def test_a_manifest_with_a_name_twice_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"twice in the manifest: \['a'\]"):
        Manifest(tensors=(*MANIFEST.tensors, MANIFEST.tensors[0]))


def test_a_digest_changes_with_every_name_dtype_shape_and_order() -> None:
    a, b, c = MANIFEST.tensors
    others = [
        (a, c, b),
        (a, b),
        (a.model_copy(update={"name": "d"}), b, c),
        (a.model_copy(update={"dtype": "bfloat16"}), b, c),
        (a.model_copy(update={"shape": (3, 2)}), b, c),
        (a.model_copy(update={"shape": (6,)}), b, c),
    ]
    digests = {Manifest(tensors=tensors).digest() for tensors in others} | {MANIFEST.digest()}
    assert len(digests) == len(others) + 1
    assert Manifest.model_validate_json(MANIFEST.model_dump_json()).digest() == MANIFEST.digest()


def test_sizes_count_every_element_once() -> None:
    assert TensorSpec(name="scalar", dtype="float64", shape=()).size_bytes == 8
    assert TensorSpec(name="empty", dtype="float32", shape=(0, 5)).size_bytes == 0
    assert TensorSpec(name="half", dtype="bfloat16", shape=(3, 5)).size_bytes == 30


# ---------------------------------------------------------------------------------------------------------------
# Strictness


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"top_k": -1},
        {"min_p": 1.0},
        {"n": 0},
        {"max_tokens": 0},
        {"stop": ("",)},
        {"temprature": 1.0},
    ],
    ids=str,
)
def test_sampling_parameters_out_of_range_are_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(fields))):
        SamplingParams.model_validate(fields)


def message_classes() -> list[type[WireModel]]:
    return [kind for kind in vars(wire).values() if isinstance(kind, type) and issubclass(kind, WireModel)]


@pytest.mark.parametrize("kind", message_classes(), ids=lambda kind: kind.__name__)
def test_every_message_is_frozen_and_refuses_unknown_keys(kind: type[WireModel]) -> None:
    assert kind.model_config.get("frozen")
    with pytest.raises(ValidationError, match="surprise"):
        kind.model_validate({"surprise": 1})


def numbers_of(schema: dict[str, Any], where: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema of an integer below ``schema``, with its path."""
    if schema.get("type") == "integer":
        yield where, schema
    for key, value in schema.items():
        parts = value if isinstance(value, list) else [value]
        for part in parts:
            if isinstance(part, dict):
                yield from numbers_of(part, f"{where}.{key}")


@pytest.mark.parametrize("kind", message_classes(), ids=lambda kind: kind.__name__)
def test_every_integer_of_a_message_has_two_bounds(kind: type[Any]) -> None:
    for where, schema in numbers_of(kind.model_json_schema()):
        assert {"minimum", "maximum"} <= schema.keys(), where
        assert -(2**63) <= schema["minimum"] <= schema["maximum"] < 2**64, where


@pytest.mark.parametrize("field", ["timeout_s", "deadline_s", "lease_s"])
@pytest.mark.parametrize("value", [0, -1e-300, 604801, 1e10, 1e308, math.inf, math.nan, 2**63, 10**300])
def test_a_time_that_no_clock_can_count_is_refused(field: str, value: float) -> None:
    kinds = [kind for kind in message_classes() if field in kind.model_fields]
    assert kinds
    for kind in kinds:
        with pytest.raises(ValidationError) as refused:
            kind.model_validate({field: value})
        assert any(problem["loc"] == (field,) for problem in refused.value.errors())


GROUP = {"run_id": "r", "transport": "gloo", "group_name": "g", "master_port": 1, "rank": 1, "world_size": 2}
GROUP |= {"secret": "0" * 64}
PULL = {"run_id": "r", "transport": "http", "url": "http://host:1/x", "token": "t", "timeout_s": 1}
BAD_HOSTS = ["", " ", "a b", "a..b", ".a", "a\nb", "a\x00", "x" * 64, "x." * 200, "-a", "é", "[::1", "http://a", "a:1"]


@pytest.mark.parametrize("host", ["localhost", "node-1.cluster_a", "10.0.0.1", "::1", "fe80::1%eth0", "x" * 63])
def test_addresses_and_names_of_hosts_are_taken(host: str) -> None:
    wire.ProcessGroupSpec.model_validate({**GROUP, "master_address": host, "timeout_s": 1})
    url = f"https://[{host}]:8/a%20b" if ":" in host else f"https://{host}:8/a%20b"
    assert wire.HttpFileSpec.model_validate({**PULL, "url": url}).url == url


@pytest.mark.parametrize("host", BAD_HOSTS)
def test_what_is_no_host_is_refused_with_the_value(host: str) -> None:
    with pytest.raises(ValidationError, match="master_address") as refused:
        wire.ProcessGroupSpec.model_validate({**GROUP, "master_address": host, "timeout_s": 1})
    assert refused.value.errors()[0]["input"] == host


@pytest.mark.parametrize(
    "url",
    [
        *(f"http://{host}/" for host in BAD_HOSTS if host not in ("http://a", "a:1")),
        "http://",
        "http:///path",
        "http://a:port",
        "http://a:99999",
        "http://a:-1",
        "http://a:0",
        "http://[a]",
        "http://me:secret@a",
        "http://a/\x00",
        "http://a/\r\nx: y",
        "ftp://a",
        "a",
    ],
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="url"):
        wire.HttpFileSpec.model_validate({**PULL, "url": url})


@pytest.mark.parametrize("token", ["", " ", "a b", "a\r\nb", "é", "\x00"])
def test_a_token_that_no_header_can_carry_is_refused(token: str) -> None:
    with pytest.raises(ValidationError, match="token"):
        wire.HttpFileSpec.model_validate({**PULL, "token": token})


def test_a_path_with_nul_and_a_rank_beyond_the_group_are_refused() -> None:
    with pytest.raises(ValidationError, match="NUL"):
        wire.DirectorySpec.model_validate({"run_id": "r", "transport": "shm", "directory": "/a\0", "timeout_s": 1})
    with pytest.raises(ValidationError, match="rank 2 is outside a group of 2"):
        wire.ProcessGroupSpec.model_validate({**GROUP, "rank": 2, "master_address": "::1", "timeout_s": 1})
    with pytest.raises(ValidationError, match="world_size"):
        wire.ProcessGroupSpec.model_validate({**GROUP, "world_size": 2**63, "master_address": "::1", "timeout_s": 1})


def test_a_chat_request_is_the_sampling_that_it_names() -> None:
    chat = ChatCompletionRequest(
        model="m",
        messages=(ChatMessage(role="user", content="x"),),
        n=2,
        max_tokens=9,
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        stop="end",
        seed=5,
    )
    expected = SamplingParams(n=2, max_tokens=7, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, stop=("end",), seed=5)
    assert chat.sampling() == expected
    assert chat.model_copy(update={"stop": ("a", "b")}).sampling().stop == ("a", "b")
    assert chat.model_copy(update={"stop": None}).sampling().stop == ()


# ---------------------------------------------------------------------------------------------------------------
# Round trips

token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=20)
names = st.text(min_size=1, max_size=20)
sampling_params = st.builds(
    SamplingParams,
    n=st.integers(1, 1024),
    max_tokens=st.none() | st.integers(1, 10**6),
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 10**6),
    min_p=st.floats(0, 1, exclude_max=True),
    stop=st.lists(names, max_size=3).map(tuple),
    stop_token_ids=token_ids.map(tuple),
    ignore_eos=st.booleans(),
    seed=st.none() | st.integers(-(2**63), 2**63),
)
requests = st.builds(
    GenerateRequest,
    request_id=names,
    prompt_token_ids=token_ids.filter(bool).map(tuple),
    sampling=sampling_params,
    stream=st.booleans(),
)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    ids = draw(token_ids)
    edges = [0, *sorted(draw(st.sets(st.integers(1, 19).filter(lambda i: i < len(ids)), max_size=3))), len(ids)]
    cut = [(10 * i, a, b) for i, (a, b) in enumerate(itertools.pairwise(edges))] if ids else []
    return Completion(
        index=draw(st.integers(0, 10)),
        token_ids=tuple(ids),
        # Logprobs travel as JSON numbers: a float64 must come back as it was.
        logprobs=tuple(draw(st.floats(-1e4, 0)) for _ in ids),
        version_spans=spans(*cut),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
    )


chunks = st.builds(
    CompletionChunk,
    request_id=names,
    index=st.integers(0, 10),
    start=st.integers(0, 1000),
    token_ids=st.just((4, 5)),
    logprobs=st.tuples(st.floats(-1e4, 0), st.floats(-1e4, 0)),
    version=st.integers(0, 10**9),
    finish_reason=st.sampled_from([None, "stop", "length", "abort"]),
)
tensor_specs = st.builds(
    TensorSpec,
    name=names,
    dtype=st.sampled_from(sorted(wire.DTYPE_SIZES)),
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
)


@st.composite
def updates(draw: st.DrawFn) -> WeightUpdate:
    specs = draw(st.lists(tensor_specs, min_size=1, max_size=8, unique_by=lambda spec: spec.name))
    return WeightUpdate(
        run_id=draw(names),
        version=draw(st.integers(0, 10**9)),
        manifest=Manifest(tensors=tuple(specs)),
        buckets=plan_buckets(specs, draw(st.integers(1, 3000))),
        in_flight=draw(st.sampled_from(InFlightPolicy)),
        deadline_s=draw(st.floats(1e-3, 1e4)),
        lease_s=draw(st.floats(1e-3, 1e4)),
    )


@given(
    message=st.one_of(
        requests,
        chunks,
        updates(),
        st.builds(GenerateResponse, request_id=names, completions=st.lists(completions(), min_size=1).map(tuple)),
    )
)
def test_messages_survive_json_exactly(message: WireModel) -> None:
    text = message.model_dump_json()
    back = type(message).model_validate_json(text)
    assert back == message
    assert back.model_dump_json() == text


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        ({}, None),
        ({"in_flight": "keep", "transport": "gloo", "encodings": ("raw", "delta"), "seeds": True}, None),
        ({"dtype": "float32", "vocab_size": 10, "processed_logprobs": True}, None),
        ({"in_flight": "drain"}, "the in-flight policy drain; it supports keep"),
        ({"transport": "shm"}, "the shm transport; it supports gloo"),
        ({"encodings": ("raw", "float8")}, "the encoding float8; it supports raw, delta"),
        ({"partial_updates": True}, "partial_updates"),
        ({"lora": True, "chat": True}, "lora, chat"),
        ({"lora_or_merged": True}, "lora or partial_updates"),
        ({"dtype": "bfloat16"}, "dtype bfloat16; it serves m in float32"),
        ({"vocab_size": 11}, "a vocabulary of 11 tokens; it serves m with 10"),
    ],
)
def test_needs_that_an_endpoint_does_not_meet_are_named(needs: dict[str, Any], words: str | None) -> None:
    can = Capabilities(
        engine="e",
        engine_version="1",
        model="m",
        vocab_size=10,
        max_model_len=10,
        dtype="float32",
        in_flight_policies=(InFlightPolicy.KEEP,),
        transports=("gloo",),
        encodings=("delta",),
        version_binding="spans",
        logprob_kind="processed",
        num_ranks=1,
        max_concurrent_sequences=1,
        streaming=False,
        chat=False,
    )
    assert ", ".join(can.missing(Needs(**needs)).values()) == (words or "")
    if words is None:
        require(can, Needs(**needs), "here")
    else:
        with pytest.raises(UnsupportedError, match=f"^here does not support {words}$"):
            require(can, Needs(**needs), "here")
