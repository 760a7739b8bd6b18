from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

from inflight.conformance.models import make_tiny_model
from tests.real_engines.servers import ENGINES, RealEngine, running


class ByEngine(LoadScopeScheduling):  # type: ignore[misc]
    """Leaves all tests of an engine to one worker, which starts the engine once, and all others of a module to one."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        where = f"{Path(file).stem} {test.partition('[')[2]}"
        # The mixed fleet has an SGLang too, and tests of SGLang look at what any of them leaves in the host's memory.
        return next((name for name in ENGINES if name in where.replace("test_train", "sglang")), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    return ByEngine(config, log)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 checkpoint with tied embeddings, which is the harder case."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", tied=True, max_model_len=1024)


@pytest.fixture(scope="session")
def engine_of(tiny_model: Path) -> Iterator[Callable[[str], RealEngine]]:
    """Starts the server that the tests of one engine share; none of them leaves it without whole weights."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda name: stack.enter_context(running(name, tiny_model)))


@pytest.fixture(scope="session", params=ENGINES)
def engine(request: pytest.FixtureRequest, engine_of: Callable[[str], RealEngine]) -> RealEngine:
    return engine_of(request.param)
