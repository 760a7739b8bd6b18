"""Exports a run as OpenTelemetry spans in OTLP JSON. Each batch becomes a line of a file, or the body of a request.

There is a trace for each step (a ``step`` span with a ``train`` span for each rank, and a ``publish`` span with its
parts) and for each item (an ``item`` span with its ``request`` spans, which contain the ``turn`` spans of an episode).
A step links to the items that it trained on. Ids are derived from the run id and the contents of the span, so exporting
a run twice gives the same spans.

Format: https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding and
https://opentelemetry.io/docs/specs/otel/protocol/file-exporter/
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from inflight import __version__
from inflight.errors import ConfigError
from inflight.observe.exports.incarnations import Incarnations, Row, publish_parts, turns_of

_BATCH = 500
_TIMEOUT_S = 30.0
_HEADERS_VARIABLE = "OTEL_EXPORTER_OTLP_HEADERS"
_INTERNAL, _CLIENT = 1, 3
_ERROR = 2
_OF_STEPS = ("reward", "lag_mean", "lag_max", "effective_sample_size", "num_step_tokens")

_NOT_FINITE = {math.inf: "Infinity", -math.inf: "-Infinity"}

Span = dict[str, Any]


def write_otlp(directory: Path, target: str) -> int:
    """Write the spans of a run to a file, or send them to a URL; return the number of spans.

    The path ``/v1/traces`` is added to a URL without a path. Requests have the headers that OTEL_EXPORTER_OTLP_HEADERS
    lists. Raises `ConfigError` if the directory contains no run, or if the target does not accept the spans.
    """
    batches = _batches(directory)
    if target.startswith(("http://", "https://")):
        url = target if urlsplit(target).path.strip("/") else target.rstrip("/") + "/v1/traces"
        return sum(_send(batch, url) for batch in batches)
    try:
        with Path(target).open("w") as file:
            return sum(_write(batch, file.write) for batch in batches)
    except OSError as error:
        raise ConfigError(f"spans cannot be written to {target!r}: {error.strerror}") from error


def _batches(directory: Path) -> Iterator[Row]:
    """Yield messages of the type ``TracesData``."""
    name = directory / "run_id"
    run_id = name.read_text().strip() if name.exists() else directory.resolve().name
    resource = {"attributes": _attributes({"service.name": "inflight", "rl.run_id": run_id})}
    scope = {"name": "inflight", "version": __version__}
    spans = _Spans(run_id, Incarnations(directory)).spans()
    while batch := list(islice(spans, _BATCH)):
        yield {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": scope, "spans": batch}]}]}


def _write(batch: Row, write: Callable[[str], object]) -> int:
    write(json.dumps(batch, allow_nan=False) + "\n")
    return _num_spans(batch)


def _send(batch: Row, url: str) -> int:
    headers = {"Content-Type": "application/json", **_headers(os.environ.get(_HEADERS_VARIABLE, ""))}
    request = urllib.request.Request(url, json.dumps(batch, allow_nan=False).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            content = answer.read()
    except urllib.error.HTTPError as error:
        with error:
            detail = error.read(500).decode(errors="replace")
        raise ConfigError(f"{url} refused the spans with status {error.code}: {detail}") from error
    except OSError as error:
        raise ConfigError(f"{url} cannot be reached: {getattr(error, 'reason', error)}") from error
    refused = _partial_success(content)
    if int(refused.get("rejectedSpans") or 0):
        raise ConfigError(f"{url} refused {refused['rejectedSpans']} spans: {refused.get('errorMessage', '')}")
    return _num_spans(batch)


def _partial_success(content: bytes) -> Row:
    try:
        answer = json.loads(content or b"{}")
    except ValueError:
        return {}  # success, reported in another format
    return dict(answer.get("partialSuccess") or {}) if isinstance(answer, dict) else {}


def _headers(text: str) -> dict[str, str]:
    """Return the headers in ``key1=value1,key2=value2``, where values are URL-encoded."""
    pairs = (part.partition("=") for part in text.split(",") if "=" in part)
    return {key.strip(): unquote(value.strip()) for key, _, value in pairs}


def _num_spans(batch: Row) -> int:
    return len(batch["resourceSpans"][0]["scopeSpans"][0]["spans"])


# ---------------------------------------------------------------------------------------------------------------
# Spans


@dataclass(slots=True)
class _Item:
    """A sampled item that is not settled yet."""

    trace_id: str
    span_id: str
    start: float
    end: float
    facts: Row


@dataclass(slots=True)
class _Step:
    """A trained step, whose publish events may still follow."""

    event: Row
    began_at: float
    links: list[Row]
    publishes: list[Row] = field(default_factory=list)


class _Spans:
    """Converts events to spans. Keeps only the unsettled items and one step in memory."""

    def __init__(self, run_id: str, incarnations: Incarnations) -> None:
        self._run_id = run_id
        self._incarnations = incarnations
        self._items: dict[int, _Item] = {}
        self._step: _Step | None = None
        self._began_at: float | None = None

    def spans(self) -> Iterator[Span]:
        for began_at, event in self._incarnations.events():
            match event["kind"]:
                case "run_started":
                    if began_at != self._began_at:
                        yield from self._end_incarnation()
                    self._began_at = began_at
                case "request":
                    yield from self._request(event, began_at)
                case "group":
                    self._group(event, began_at)
                case "item_dropped":
                    yield from self._settle(event["item"], event["reason"])
                case "train":
                    yield from self._end_step()
                    links = [self._link(self._items[item]) for item in event["items"] if item in self._items]
                    self._step = _Step(event, began_at, links)
                    for item in event["items"]:
                        yield from self._settle(item, "trained", {"rl.version": event["version"]})
                case "publish":
                    if self._step is not None and self._step.event["version"] == event["version"]:
                        self._step.publishes.append(event)
                    else:
                        trace_id = self._id("publish", event["version"], event["start_s"], began_at)
                        yield from self._publish(event, began_at, trace_id, None)
                case "failure":
                    trace_id = self._id("failure", event["start_s"], began_at)
                    what = event["what"]
                    yield self._span(
                        "failure", trace_id, None, _unix_times(event, began_at), {"rl.what": what}, error=what
                    )
        yield from self._end_incarnation()
        yield from self._metrics_of_steps()

    def _request(self, event: Row, began_at: float) -> Iterator[Span]:
        index, (start, end) = event["item"], _unix_times(event, began_at)
        if index not in self._items:
            trace_id = self._id("item", index, began_at)
            self._items[index] = _Item(trace_id, trace_id[:16], start, end, {"rl.item": index})
        item = self._items[index]
        item.start, item.end = min(start, item.start), max(end, item.end)
        facts = {
            "rl.item": index,
            "rl.request_id": event["request_id"],
            "server.address": event["endpoint"],
            "rl.num_tokens": sum(part["num_tokens"] for part in event["parts"]),
            "rl.version_spans": [
                f"{part['number']}: {begin}-{stop} v{version}"
                for part in event["parts"]
                for begin, stop, version in part["spans"]
            ],
            "rl.finish_reasons": [part["finish_reason"] for part in event["parts"]],
        }
        is_failed = event.get("error") not in (None, "cancelled")
        error = event["error"] if is_failed else None
        request = self._span("request", item.trace_id, item.span_id, (start, end), facts, kind=_CLIENT, error=error)
        yield request
        for turn in turns_of(event):
            facts = {
                "rl.item": index,
                "rl.turn": turn.number,
                "rl.num_tokens": turn.num_tokens,
                "rl.version_spans": [f"{begin}-{stop} v{version}" for begin, stop, version in turn.spans],
            }
            times = (turn.start_s + began_at, turn.end_s + began_at)
            yield self._span("turn", item.trace_id, request["spanId"], times, facts, kind=_CLIENT)

    def _group(self, event: Row, began_at: float) -> None:
        if (item := self._items.get(event["item"])) is not None:
            item.end = max(item.end, event["end_s"] + began_at)
            item.facts |= {"rl.rewards": event["rewards"], "rl.lengths": event["lengths"]}

    def _settle(self, index: int, outcome: str, facts: Mapping[str, Any] | None = None) -> Iterator[Span]:
        if (item := self._items.pop(index, None)) is not None:
            facts = {**item.facts, "rl.outcome": outcome, **(facts or {})}
            yield self._span("item", item.trace_id, None, (item.start, item.end), facts, span_id=item.span_id)

    def _end_incarnation(self) -> Iterator[Span]:
        """Settle the items that were open when a process ended; the next process samples them again."""
        yield from self._end_step()
        for index in list(self._items):
            yield from self._settle(index, "outstanding")

    def _end_step(self) -> Iterator[Span]:
        if (step := self._step) is None:
            return
        self._step = None
        event, began_at = step.event, step.began_at
        trace_id = self._id("step", event["version"], began_at)
        start, end = _unix_times(event, began_at)
        end = max([end, *(it["end_s"] + began_at for it in step.publishes)])
        facts = {"rl.version": event["version"], "rl.num_items": len(event["items"])}
        yield self._span("step", trace_id, None, (start, end), facts, span_id=trace_id[:16], links=step.links)
        for rank, (begin, stop) in enumerate(event["ranks"]):
            span = (begin + began_at, stop + began_at)
            yield self._span("train", trace_id, trace_id[:16], span, {"rl.rank": rank, "rl.version": event["version"]})
        for publish in step.publishes:
            yield from self._publish(publish, began_at, trace_id, trace_id[:16])

    def _publish(self, event: Row, began_at: float, trace_id: str, parent: str | None) -> Iterator[Span]:
        facts = {
            "rl.version": event["version"],
            "rl.size_bytes": event["size_bytes"],
            "rl.sent_bytes": event["sent_bytes"],
            "rl.outcomes": [f"{endpoint} {outcome}" for endpoint, outcome in event["outcomes"].items()],
        }
        span_id = self._id("publish", event["version"], event["start_s"], began_at)[:16]
        yield self._span("publish", trace_id, parent, _unix_times(event, began_at), facts, span_id=span_id)
        for name, (start, end) in publish_parts(event).items():
            yield self._span(f"publish {name}", trace_id, span_id, (start + began_at, end + began_at), {})

    def _metrics_of_steps(self) -> Iterator[Span]:
        """Yield a span of zero duration for the metrics of each step, in the trace of the step."""
        for began_at, step in self._incarnations.steps():
            trace_id = self._id("step", step["version"], began_at)
            facts = {f"rl.{name}": step[name] for name in _OF_STEPS if step.get(name) is not None}
            yield self._span("metrics", trace_id, trace_id[:16], _unix_times(step, began_at), facts)

    def _id(self, *what: object) -> str:
        return hashlib.sha256(json.dumps([self._run_id, *what]).encode()).hexdigest()[:32]

    def _link(self, item: _Item) -> Row:
        return {"traceId": item.trace_id, "spanId": item.span_id}

    def _span(
        self,
        name: str,
        trace_id: str,
        parent: str | None,
        times: tuple[float, float],
        facts: Mapping[str, Any],
        *,
        span_id: str | None = None,
        kind: int = _INTERNAL,
        links: Sequence[Row] = (),
        error: str | None = None,
    ) -> Span:
        span: Span = {
            "traceId": trace_id,
            "spanId": span_id or self._id(trace_id, name, *times, json.dumps(facts, default=str))[:16],
            "name": name,
            "kind": kind,
            "startTimeUnixNano": _nanoseconds(times[0]),
            "endTimeUnixNano": _nanoseconds(max(times)),
            "attributes": _attributes(facts),
        }
        if parent is not None:
            span["parentSpanId"] = parent
        if links:
            span["links"] = list(links)
        if error is not None:
            span["status"] = {"code": _ERROR, "message": error}
        return span


def _unix_times(event: Row, began_at: float) -> tuple[float, float]:
    return event["start_s"] + began_at, event["end_s"] + began_at


def _nanoseconds(seconds: float) -> str:
    return str(round(seconds * 1e9))


def _attributes(facts: Mapping[str, Any]) -> list[Row]:
    return [{"key": key, "value": _value(value)} for key, value in facts.items()]


def _value(value: Any) -> Row:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value if math.isfinite(value) else _NOT_FINITE.get(value, "NaN")}
    if isinstance(value, list | tuple):
        return {"arrayValue": {"values": [_value(one) for one in value]}}
    return {"stringValue": str(value)}
