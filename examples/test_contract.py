"""The conformance kit in your own tests: put your factory where the embedded engine's is.

pytest examples/test_contract.py
"""

import pytest

from inflight.conformance import EndpointTarget, Kit, endpoint_checks


@pytest.fixture(scope="module")
def kit():
    with Kit(EndpointTarget(factory="inflight.engines.embedded.loading:load_endpoint")) as kit:
        yield kit


@pytest.mark.parametrize("check", endpoint_checks(), ids=str)
def test_contract(kit, check):
    kit.run(check).raise_unless_good()
