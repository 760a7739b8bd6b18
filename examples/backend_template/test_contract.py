"""The conformance kit as tests of this package: pytest test_contract.py."""

import pytest

from inflight.conformance import EndpointTarget, Kit, endpoint_checks


@pytest.fixture(scope="module")
def kit():
    with Kit(EndpointTarget(factory="my_engine:MyEndpoint")) as kit:
        yield kit


@pytest.mark.parametrize("check", endpoint_checks(), ids=str)
def test_contract(kit, check):
    kit.run(check).raise_unless_good()
