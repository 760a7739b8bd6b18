"""Servers that the tests of one module share, and publishers that are closed whatever happens."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight.weights.send.publisher import WeightPublisher
from tests.gates import BrakedServer
from tests.models import make_model
from tests.servers import TOKEN, ServerProcess


@pytest.fixture(scope="module")
def two_servers(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[BrakedServer, BrakedServer]]:
    """Two servers of the tiny model. A test may publish to them, and leaves them ready and without brakes."""
    servers = [BrakedServer(model_dir, tmp_path_factory.mktemp(f"server-{i}")) for i in range(2)]
    for server in servers:
        server.wait_until_ready()
    yield servers[0], servers[1]
    for server in servers:
        server.kill()


@pytest.fixture(scope="session")
def large_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 50 MB, which travels for long enough to be caught in the middle."""
    path = tmp_path_factory.mktemp("model") / "large"
    return make_model(path, hidden_size=256, vocab_size=20_000, max_model_len=1024)


@pytest.fixture
def connect() -> Iterator[Callable[..., WeightPublisher]]:
    """Connect publishers to server processes; each is closed at the end of the test."""
    publishers: list[WeightPublisher] = []

    def connect(
        *servers: ServerProcess, run_id: str | None = None, timeout_s: float = 20.0, **options: Any
    ) -> WeightPublisher:
        publisher = WeightPublisher.connect(
            [server.url for server in servers],
            run_id=run_id or f"run-{uuid.uuid4().hex[:8]}",
            token=TOKEN,
            connect_timeout_s=timeout_s,
            **options,
        )
        publishers.append(publisher)
        return publisher

    yield connect
    for publisher in publishers:
        publisher.close()
