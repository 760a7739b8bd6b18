from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.conformance.models import make_tiny_model
from tests.real_engines.servers import ENGINES, RealEngine, running


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 checkpoint with tied embeddings, which is the harder case."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", tied=True, max_model_len=1024)


@pytest.fixture(scope="session", params=ENGINES)
def engine(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[RealEngine]:
    """A server that the tests of one engine share; none of them leaves it without whole weights."""
    with running(request.param, tiny_model) as started:
        yield started
