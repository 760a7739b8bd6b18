"""A server for the tests with the real SDK, ``test_sdk_*.py``, which ``make test-tinker`` runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.dialects.tinker.server import KEY, TinkerServer

if TYPE_CHECKING:
    import tinker

os.environ["TINKER_TELEMETRY"] = "0"


@pytest.fixture(scope="session")
def sdk_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    """A server whose base model has its path for a name, by which a `SamplingClient` finds the tokenizer."""
    from tests.models import make_model

    parent = tmp_path_factory.mktemp("sdk")
    model = make_model(parent / "model", "llama", tied=True)
    server = TinkerServer(model, parent / "served", "--name", str(model), "--models", "3", "--samplers", "3")
    yield server
    server.end()


@pytest.fixture
def service(sdk_server: TinkerServer) -> Iterator[tinker.ServiceClient]:
    """A session, which ends with the test, and with it the models that it has in training."""
    import tinker

    service = tinker.ServiceClient({"purpose": "tests"}, display_name="A test", base_url=sdk_server.url, api_key=KEY)
    yield service
    service.close("success").result(60)


@pytest.fixture
def rest(sdk_server: TinkerServer) -> tinker.RestClient:
    import tinker

    return tinker.RestClient(base_url=sdk_server.url, api_key=KEY)
