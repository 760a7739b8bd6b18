"""Fixtures shared by all tests: tiny models made on the spot, and real server processes."""

from __future__ import annotations

import gc
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads of what tests start would spin on cores that others need
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.gates import BrakedServer
from tests.run.runs import RunProcess
from tests.servers import ServerProcess
from tests.slow import mark_slow, write_slow
from tests.zygote import python, share_zygote

# A machine with other work takes a second now and then; a strategy that is slow shows in the durations.
settings.register_profile("inflight", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("inflight")


def pytest_configure(config: pytest.Config) -> None:
    """Start the zygote of all workers from xdist's controller, which runs no test and so imports no torch."""
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        share_zygote()
        return
    gc.disable()
    import torch

    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow tests before `-m` selects tests by their marks."""
    mark_slow(items)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write the list of slow tests, if the session is asked for it."""
    reports = [it for of_outcome in terminalreporter.stats.values() for it in of_outcome]
    write_slow(it for it in reports if isinstance(it, pytest.TestReport))


def pytest_collection_finish() -> None:
    """Leave what is imported and collected out of later garbage collections: each would take half a second for it."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Have everything collected at the end again: triton's bindings print what is left."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Qwen3 checkpoint with untied head and the byte tokenizer, float32, context 1024."""
    from tests.models import make_model

    return make_model(tmp_path_factory.mktemp("model") / "tiny-qwen3")


@pytest.fixture(scope="module")
def forks() -> Iterator[None]:
    """Let the kit and the processes that it starts be forked from a zygote."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", python())
        yield


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Start real ``inflight serve`` processes; all of them are killed at the end of the test."""
    servers: list[ServerProcess] = []

    def start(model: Path, *arguments: str) -> ServerProcess:
        server = ServerProcess(model, tmp_path / f"server-{len(servers)}", *arguments)
        servers.append(server)
        server.wait_until_ready()
        return server

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def start_run(tmp_path: Path, model_dir: Path) -> Iterator[Callable[..., RunProcess]]:
    """Start real ``inflight train`` processes; all of them are killed at the end of the test."""
    runs: list[RunProcess] = []

    def start(*overrides: str, model: Path = model_dir, **settings: Any) -> RunProcess:
        runs.append(RunProcess(tmp_path, model, *overrides, **settings))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()


@pytest.fixture(scope="session")
def shared_server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One real server for tests that leave it as they found it (no weight updates, no kills)."""
    server = ServerProcess(model_dir, tmp_path_factory.mktemp("shared-server"), "--drafts", "both")
    server.wait_until_ready()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def braked_server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrakedServer]:
    """One real server with a brake, for tests that leave it as they found it."""
    server = BrakedServer(model_dir, tmp_path_factory.mktemp("braked-server"))
    server.wait_until_ready()
    yield server
    server.kill()
