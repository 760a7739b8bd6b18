"""A proxy in front of a server, which loses answers to calls that the server has executed."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

_KEPT_HEADERS = ("content-type", "content-encoding", "accept", "x-api-key")


class LossyProxy:
    """Loses the first answer to each ``POST`` of a path that it ``loses``, and changes settings of the SDK."""

    def __init__(self, target: str, *, loses: Callable[[str], bool], settings: Mapping[str, Any]) -> None:
        self.target = target
        self.requests: list[tuple[str, bytes]] = []
        """Path and body of each ``POST``, in the order of their arrival."""
        self.lost: Counter[str] = Counter()
        self._loses = loses
        self._settings = settings
        self._lock = threading.Lock()
        self._http = httpx.Client(timeout=120)

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> httpx.Response | None:
        """Forward a request; return None if its answer is to be lost."""
        kept = {name: headers[name] for name in _KEPT_HEADERS if name in headers}
        with self._lock:
            self.requests.append((path, body))
        answer = self._http.request(method, self.target + path, headers=kept, content=body)
        if path.endswith("/client/config"):
            return httpx.Response(answer.status_code, json=answer.json() | self._settings)
        with self._lock:
            if method == "POST" and path not in self.lost and self._loses(path):
                self.lost[path] += 1
                return None
        return answer


@contextlib.contextmanager
def lossy_proxy(
    target: str, *, loses: Callable[[str], bool] = lambda path: False, settings: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, LossyProxy]]:
    """Yield the URL of a proxy and the proxy. ``settings`` are added to those that the server has for the SDK."""
    proxy = LossyProxy(target, loses=loses, settings=settings or {})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self._forward()

        def do_GET(self) -> None:
            self._forward()

        def _forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            answer = proxy.answer(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body)
            self.close_connection = answer is None
            if answer is None:
                return
            self.send_response(answer.status_code)
            self.send_header("Content-Type", answer.headers["content-type"])
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        proxy._http.close()
