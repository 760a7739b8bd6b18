"""What a request without a token costs a server and a recording proxy: memory by its bytes, and the delay of a probe.

    python benchmarks/hostile_requests.py models/smollm2

``inflight serve`` and ``inflight proxy`` run as processes of their own. Each request is sent several times, while a
probe on another connection asks for ``/v1/models`` or ``/capabilities`` every few milliseconds. Memory is the growth
of the resident set at its highest, which the kernel resets before each request. Writes
``results/hostile_requests.json``.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from results import write_results

TOKEN = "benchmark"
MB = 1 << 20
NUM_TIMES = 3
PROBE_S = 0.003
PATIENCE_S = 20.0
"""After this long the client leaves, and its status counts as 0."""


def chat(text: str = "", **fields: Any) -> bytes:
    """Return a chat of one message."""
    body = {"model": "model", "messages": [{"role": "user", "content": text}], "max_tokens": 1, **fields}
    return json.dumps(body).encode()


def filled(before: bytes, part: bytes, after: bytes, size_bytes: int) -> bytes:
    """Return a body of about this size, with as many ``part`` as fit, separated by commas."""
    return before + b",".join([part] * ((size_bytes - len(before) - len(after)) // (len(part) + 1))) + after


def keys(size_bytes: int) -> bytes:
    """Return unknown keys, in the form of an object without its end."""
    return b",".join(b'"k%d":0' % i for i in range(size_bytes // 11))


def requests_of(size: int) -> dict[str, tuple[str, bytes]]:
    """Return the path and the body of each hostile request."""
    generate, completions = "/v1/generate", "/v1/chat/completions"
    sampled = b'{"request_id":"r","sampling":{"max_tokens":1},"prompt_token_ids":['
    message = b'{"role":"user","content":"a"}'
    head = b'{"model":"model","max_tokens":1,"messages":['
    return {
        "`[]` in place of token ids": (generate, filled(sampled, b"[]", b"]}", size)),
        "`{}` in place of token ids": (generate, filled(sampled, b"{}", b"]}", size)),
        "token ids": (generate, filled(sampled, b"7", b"]}", size)),
        "lists 150 deep": (generate, filled(sampled, b"[" * 150 + b"]" * 150, b"]}", size)),
        "unknown keys": (generate, b"{" + keys(size) + b"}"),
        "a number of many digits": (generate, sampled + b"9" * (size // 2) + b"]}"),
        "`[]` in place of messages": (completions, filled(head, b"[]", b"]}", size)),
        "short messages": (completions, filled(head, message, b"]}", size)),
        "a message of short parts": (
            completions,
            filled(head + b'{"role":"user","content":[', b'{"type":"text","text":"a"}', b"]}]}", size),
        ),
        "text of letters": (completions, chat("a b c d e f g h" * (size // 16))),
        "text of digits": (completions, chat("7" * (size - 200))),
        "text of commas and brackets": (completions, chat("[{,}]," * (size // 7))),
        "text of one blank": (completions, chat(" " * (size - 200))),
        "text of escapes": (completions, chat("\u0416" * (size // 7))),
        "a long role": (completions, head + b'{"role":"' + b"a" * (size - 100) + b'","content":"a"}]}'),
        "a long stop string": (completions, chat("a", stop="s" * (size - 200))),
        "many stop strings": (completions, chat("a", stop=["s"] * (size // 5))),
        "1,024 completions with logprobs": (completions, chat("a", n=1024, logprobs=True)),
    }


class Server:
    """A process that serves, and the peak of its memory."""

    def __init__(self, command: list[str], url: str) -> None:
        self.url = url
        self.process = subprocess.Popen(
            [sys.executable, "-m", "inflight", *command],
            env={**os.environ, "INFLIGHT_TOKEN": TOKEN},
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 120
        while True:
            try:
                self.call("GET", "/v1/models")
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=PATIENCE_S)

    def call(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        """Return status and answer; a status of 0 if there was none."""
        connection = self.connect()
        try:
            connection.request(method, path, body, {"content-type": "application/json", **headers})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (TimeoutError, BrokenPipeError, ConnectionResetError, http.client.RemoteDisconnected):
            return 0, b""
        finally:
            connection.close()

    def resident_bytes(self, field: str) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(field))

    def begin_peak(self) -> int:
        """Reset the peak of the resident set, and return the present resident bytes."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return self.resident_bytes("VmRSS")


@contextmanager
def probing(server: Server, path: str, headers: dict[str, str]) -> Iterator[list[float]]:
    """Ask again and again during the body, and collect how long each answer took."""
    delays: list[float] = []
    stopping = threading.Event()

    def probe() -> None:
        connection = server.connect()
        while not stopping.is_set():
            began = time.perf_counter()
            connection.request("GET", path, headers=headers)
            connection.getresponse().read()
            delays.append(time.perf_counter() - began)
            time.sleep(PROBE_S)
        connection.close()

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield delays
    finally:
        stopping.set()
        thread.join()


def measured(
    name: str, server: Server, path: str, body: bytes, probe_path: str, headers: dict[str, str]
) -> dict[str, Any]:
    """Return the status, the memory and the longest delay of one request."""
    peaks, longest, seconds, status = [], [], [], 0
    for _ in range(NUM_TIMES):
        with probing(server, probe_path, headers) as delays:
            time.sleep(0.1)
            before, began = server.begin_peak(), time.perf_counter()
            status, _ = server.call("POST", path, body, **headers)
            seconds.append(time.perf_counter() - began)
            time.sleep(0.1)
            peaks.append(server.resident_bytes("VmHWM") - before)
        longest.append(max(delays[3:]))
    row = {
        "request": name,
        "bytes": len(body),
        "status": status,
        "memory_bytes": max(peaks),
        "times_its_bytes": round(max(peaks) / len(body), 1),
        "longest_delay_ms": round(1e3 * sorted(longest)[NUM_TIMES // 2], 1),
        "seconds": round(min(seconds), 3),
    }
    print(
        f"  {name:36} {row['bytes']:9} B  {status}  {row['times_its_bytes']:8}x  "
        f"{row['longest_delay_ms']:8} ms  {row['seconds']} s",
        flush=True,
    )
    return row


def against(
    server: Server, name: str, size: int, is_wanted: Callable[[str], bool], prefix: str, probe_path: str
) -> list[dict[str, Any]]:
    """Return the rows of one server."""
    print(name, flush=True)
    server.call("POST", f"{prefix}/v1/chat/completions", chat("warm up"))
    quiet = measured("nothing (GET)", server, probe_path, b" " * 64, probe_path, {})
    rows = [
        measured(what, server, prefix + path, body, probe_path, {})
        for what, (path, body) in requests_of(size).items()
        if is_wanted(path)
    ]
    return [{"server": name, **row} for row in (quiet, *rows)]


def main() -> None:
    """Measure every request, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--megabytes", type=float, default=0.95)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    size = int(arguments.megabytes * MB)
    if True:
        ports = (18471, 18472)
        url = f"http://127.0.0.1:{ports[0]}"
        serve = ["serve", str(arguments.model), "--port", str(ports[0]), "--name", "model", "--threads", "1"]
        serve += ["--kv-cache", "200MB"]
        server = Server(serve, url)
        proxy = Server(
            ["proxy", url, "--model", str(arguments.model), "--port", str(ports[1])], f"http://127.0.0.1:{ports[1]}"
        )
        try:
            rows = []
            if arguments.only in ("", "server"):
                rows += against(server, "server", size, lambda _: True, "", "/v1/models")
            if arguments.only in ("", "proxy"):
                _, opened = proxy.call("POST", "/episodes", b"{}", authorization=f"Bearer {TOKEN}")
                key = json.loads(opened)["key"]
                rows += against(proxy, "proxy", size, lambda path: "chat" in path, f"/e/{key}", f"/e/{key}/v1/models")
        finally:
            for it in (proxy, server):
                it.process.terminate()
                it.process.wait(30)

    write_results("hostile_requests", rows)


if __name__ == "__main__":
    main()
