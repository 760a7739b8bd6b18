"""Streams of a Redis server. Every call has a deadline, no call is retried, and no message contains the password."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from inflight.errors import ConfigError, TransferError

DEFAULT_URL = "redis://127.0.0.1:6379"
FIRST = "0-0"
"""The id before the first entry of every stream."""


class StreamState(NamedTuple):
    """The newest id that a stream has had, and how many entries were ever added to it."""

    last_id: str
    num_added: int


class RedisStreams:
    """The streams of the server at ``redis://[:PASSWORD@]HOST:PORT[/DB]``, or ``rediss://`` for TLS.

    It connects at the first call. Calls block for up to ``timeout_s`` seconds, and raise `TransferError` if they fail.
    Raises `ConfigError` for any other URL.
    """

    def __init__(self, url: str, timeout_s: float = 30.0) -> None:
        try:
            import redis
        except ModuleNotFoundError as error:
            raise ConfigError(f"{error.name} is not installed; pip install 'inflight[fast-llm]'") from error
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        try:
            parts = urlsplit(url)
            self.name = f"Redis at {parts.hostname}:{parts.port or 6379}"
            if parts.scheme not in ("redis", "rediss") or not parts.hostname:
                raise ValueError
            # A repeated call could add an event twice, which every server would wait for.
            self._client: Any = redis.Redis.from_url(
                url,
                protocol=2,
                retry=Retry(NoBackoff(), 0),
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
            )
        except ValueError:  # its text may contain the password
            raise ConfigError(
                "the URL of the Redis server is not supported; write redis://[:PASSWORD@]HOST:PORT[/DB]"
            ) from None
        self._failures = (redis.RedisError, OSError)

    def add(self, stream: str, fields: Mapping[str, bytes], max_length: int | None = None) -> str:
        """Add an entry and return its id.

        Redis removes the oldest entries beyond about ``max_length``, even unread ones.
        """
        with self._errors(f"adding to {stream}"):
            return str(self._client.xadd(stream, dict(fields), maxlen=max_length, approximate=True), "ascii")

    def read(self, stream: str, after: str, wait_s: float) -> list[tuple[str, dict[bytes, bytes]]]:
        """Return up to 16 entries after an id; empty if none arrives within ``wait_s``."""
        with self._errors(f"reading {stream}"):
            found = self._client.xread({stream: after}, count=16, block=max(1, int(1000 * wait_s)))
            return [(str(entry, "ascii"), fields or {}) for _, entries in found or () for entry, fields in entries]

    def state(self, stream: str) -> StreamState:
        """Return the state of a stream; a missing stream has no entries.

        Raises `ConfigError` if the server is older than Redis 7.
        """
        with self._errors(f"reading the state of {stream}"):
            if not self._client.exists(stream):
                return StreamState(FIRST, 0)
            info = self._client.xinfo_stream(stream)
        if "entries-added" not in info:
            raise ConfigError(f"{self.name} does not count the entries of streams; use Redis 7 or newer")
        return StreamState(str(info["last-generated-id"], "ascii"), int(info["entries-added"]))

    def delete(self, stream: str) -> None:
        """Delete a stream, if it exists."""
        with self._errors(f"deleting {stream}"):
            self._client.delete(stream)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._client.close()

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._failures as error:
            raise TransferError(f"{self.name}: {what} failed: {type(error).__name__}: {error}") from error
