"""OpenTelemetry's own definitions read the spans of a run."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from inflight.cli import main
from inflight.errors import ConfigError
from inflight.observe.exports import otlp
from inflight.observe.exports.otlp import write_otlp
from tests.exports.runs import A, whole_run

_IDS = {"traceId", "spanId", "parentSpanId"}


def parsed(line: str, message: Any) -> Any:
    """Read a line as OTLP says: protobuf's JSON, but ids in hexadecimal instead of base64."""

    def converted(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: converted(one, name) for name, one in value.items()}
        if isinstance(value, list):
            return [converted(one) for one in value]
        if key in _IDS:
            assert re.fullmatch("[0-9a-f]{32}" if key == "traceId" else "[0-9a-f]{16}", value)
            return base64.b64encode(bytes.fromhex(value)).decode()
        return value

    return ParseDict(converted(json.loads(line)), message)


def spans_of(lines: list[str]) -> list[Any]:
    messages = [parsed(line, TracesData()) for line in lines]
    return [
        span
        for message in messages
        for resource in message.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def attributes(span: Any) -> dict[str, Any]:
    def value(one: Any) -> Any:
        kind = one.WhichOneof("value")
        return [value(it) for it in one.array_value.values] if kind == "array_value" else getattr(one, kind)

    return {it.key: value(it.value) for it in span.attributes}


@pytest.fixture
def spans(tmp_path: Path) -> list[Any]:
    whole_run(tmp_path)
    num_spans = write_otlp(tmp_path, str(tmp_path / "out.jsonl"))
    found = spans_of((tmp_path / "out.jsonl").read_text().splitlines())
    assert len(found) == num_spans
    return found


def test_spans_form_whole_trees_within_their_parents_and_times(spans: list[Any]) -> None:
    by_id = {(span.trace_id, span.span_id): span for span in spans}
    assert len(by_id) == len(spans), "no id twice"
    for span in spans:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.start_time_unix_nano > 1000 * 10**9
        if span.parent_span_id and span.name not in ("metrics", "publish first token"):
            parent = by_id[span.trace_id, span.parent_span_id]
            assert parent.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= parent.end_time_unix_nano
    roots = Counter(span.name for span in spans if not span.parent_span_id)
    assert roots == {"publish": 1, "item": 7, "step": 3, "failure": 1}
    assert all((link.trace_id, link.span_id) in by_id for span in spans for link in span.links)


def test_items_have_their_requests_versions_rewards_and_outcome(spans: list[Any]) -> None:
    items = [attributes(span) for span in spans if span.name == "item"]
    outcomes = [(it["rl.item"], it["rl.outcome"], it.get("rl.version")) for it in items]
    assert sorted(outcomes, key=str) == [
        (0, "trained", 1),
        (1, "trained", 1),
        (2, "failed", None),
        (3, "trained", 2),
        (3, "trained", 2),
        (4, "outstanding", None),
        (4, "outstanding", None),
    ]
    (item,) = [span for span in spans if span.name == "item" and attributes(span)["rl.item"] == 0]
    assert attributes(item)["rl.rewards"] == [0.0, 1.0]
    (request,) = [span for span in spans if span.parent_span_id == item.span_id]
    assert request.name == "request"
    facts = attributes(request)
    assert facts["rl.version_spans"] == ["0: 0-20 v4", "0: 20-30 v5"]
    assert (facts["server.address"], facts["rl.num_tokens"]) == (A, 30)
    (failed,) = [span for span in spans if span.name == "request" and span.status.code == 2]
    assert failed.status.message == "ConnectionError: refused"


def test_turns_of_an_episode_are_spans_of_its_request_with_their_tokens_and_versions(spans: list[Any]) -> None:
    turns = [span for span in spans if span.name == "turn"]
    requests = {attributes(span)["rl.item"] for span in spans for turn in turns if span.span_id == turn.parent_span_id}
    assert requests == {3}
    assert [attributes(turn) for turn in turns] == [
        {"rl.item": 3, "rl.turn": 1, "rl.num_tokens": 15, "rl.version_spans": ["0-15 v4"]},
        {"rl.item": 3, "rl.turn": 2, "rl.num_tokens": 15, "rl.version_spans": ["15-20 v4", "20-30 v5"]},
    ]
    times = [(turn.start_time_unix_nano / 1e9, turn.end_time_unix_nano / 1e9) for turn in turns]
    assert times == [(1003.0, 1004.0), (1004.5, 1005.0)]


def test_steps_have_their_ranks_publish_metrics_and_links_to_their_items(spans: list[Any]) -> None:
    step = next(span for span in spans if span.name == "step")
    within = [span for span in spans if span.trace_id == step.trace_id and span is not step]
    assert Counter(span.name for span in within) == {
        "train": 2,
        "publish": 1,
        "publish gather": 1,
        "publish wire": 1,
        "publish load": 1,
        "publish pause": 1,
        "publish first token": 1,
        "metrics": 1,
    }
    (metrics,) = [attributes(span) for span in within if span.name == "metrics"]
    assert (metrics["rl.reward"], metrics["rl.lag_mean"]) == (0.5, 1.5)
    linked = {link.trace_id for link in step.links}
    assert linked == {
        span.trace_id for span in spans if span.name == "item" and attributes(span).get("rl.version") == 1
    }
    assert (step.start_time_unix_nano, step.end_time_unix_nano) == (1006 * 10**9, 1008_600_000_000)


def test_the_same_run_has_the_same_spans(tmp_path: Path) -> None:
    whole_run(tmp_path)
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for file in files:
        write_otlp(tmp_path, str(file))
    assert files[0].read_bytes() == files[1].read_bytes()


# ---------------------------------------------------------------------------------------------------------------
# Collectors


class Collector(HTTPServer):
    """Takes spans at ``/v1/traces``, or answers as it is told."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.answer = (200, b'{"partialSuccess": {}}')
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        status, content = self.server.answer if self.path == "/v1/traces" else (404, b"no such path")
        if status == 200:
            self.server.bodies.append(body)
            self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


def test_a_collector_gets_the_spans_in_batches_with_its_headers(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(otlp, "_BATCH", 10)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=letters%20team, x-other=1")
    whole_run(tmp_path)
    assert main(["trace", str(tmp_path), "--otlp", collector.url]) == 0
    write_otlp(tmp_path, str(tmp_path / "out.jsonl"))
    assert spans_of(collector.bodies) == spans_of((tmp_path / "out.jsonl").read_text().splitlines())
    assert len(collector.bodies) > 3
    assert all(parsed(body, ExportTraceServiceRequest()).resource_spans for body in collector.bodies)
    assert {headers["x-team"] for headers in collector.headers} == {"letters team"}
    assert "spans to http://127.0.0.1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((400, b"bad spans"), "refused the spans with status 400: bad spans"),
        ((200, b'{"partialSuccess": {"rejectedSpans": "3", "errorMessage": "full"}}'), "refused 3 spans: full"),
    ],
)
def test_spans_that_a_collector_refuses_are_an_error(
    tmp_path: Path, collector: Collector, answer: tuple[int, bytes], message: str
) -> None:
    whole_run(tmp_path)
    collector.answer = answer
    with pytest.raises(ConfigError, match=message):
        write_otlp(tmp_path, collector.url)


def test_a_collector_that_is_not_there_and_a_file_that_cannot_be_written_are_errors(tmp_path: Path) -> None:
    whole_run(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be reached: .*refused"):
        write_otlp(tmp_path, "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"spans cannot be written to .*: No such file"):
        write_otlp(tmp_path, str(tmp_path / "no" / "out.jsonl"))
