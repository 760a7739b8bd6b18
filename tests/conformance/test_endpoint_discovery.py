"""Endpoints that support less than the embedded one and keep to it pass the kit, with what is unsupported skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inflight.conformance.checks import select
from inflight.conformance.endpoint.catalogue import CHECKS
from inflight.conformance.kit import Kit
from inflight.conformance.targets import EndpointTarget
from inflight.conformance.verdicts import CheckOutcome
from inflight.contracts import InferenceEndpoint
from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.loading import load_endpoint
from inflight.errors import UnsupportedError
from inflight.wire import Capabilities, ChatCompletion, ChatCompletionRequest, InFlightPolicy, WeightUpdate
from tests.conformance.mutants.patches import drawing, with_capabilities
from tests.conformance.mutants.sampling import reporting_unscaled

pytestmark = pytest.mark.usefixtures("forks")
SAME_AS_THE_EMBEDDED = (
    "name",
    "init_process_group",
    "receive_weights",
    "commit_weight_update",
    "abort_weight_update",
    "generate",
    "weight_version",
    "aclose",
)


class ModestEndpoint:
    """The embedded endpoint without streams and chat, four sequences at a time, under ``keep`` only."""

    def __init__(self, endpoint: EmbeddedEndpoint) -> None:
        self._endpoint = endpoint
        for name in SAME_AS_THE_EMBEDDED:
            setattr(self, name, getattr(endpoint, name))

    async def capabilities(self) -> Capabilities:
        declared = await self._endpoint.capabilities()
        less: dict[str, Any] = {"in_flight_policies": (InFlightPolicy.KEEP,), "streaming": False, "chat": False}
        return declared.model_copy(update=less)

    async def request_weight_update(self, update: WeightUpdate) -> None:
        if update.in_flight is not InFlightPolicy.KEEP:
            raise UnsupportedError(f"{update.in_flight} is not supported")
        await self._endpoint.request_weight_update(update)

    async def chat_completion(self, request: ChatCompletionRequest) -> ChatCompletion:
        raise UnsupportedError("chat is not supported")


def modest(model: Path) -> InferenceEndpoint:
    return ModestEndpoint(load_endpoint(model, max_concurrent=4))


def one_at_a_time(model: Path) -> InferenceEndpoint:
    return load_endpoint(model, max_concurrent=1)


def raw_logprobs(model: Path) -> InferenceEndpoint:
    return with_capabilities(logprob_kind="raw")(drawing(reporting_unscaled)(load_endpoint(model)))


@pytest.mark.parametrize(
    ("factory", "ids", "skipped"),
    [
        pytest.param(modest, (), {"E-23", "E-24", "E-29"}, marks=pytest.mark.exhaustive),
        (one_at_a_time, ("E-07", "E-08", "E-17", "E-25", "E-26"), {"E-26"}),
        (raw_logprobs, ("E-10", "E-12", "E-13", "E-14", "E-16"), set()),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_an_endpoint_that_declares_less_passes(factory, ids, skipped):
    checks = select(CHECKS, ids) if ids else select(CHECKS, levels=("discovery", "tokens"))
    with Kit(EndpointTarget(factory=f"{__name__}:{factory.__name__}")) as kit:
        verdicts = [kit.run(check) for check in checks]
    wrong = [(v.id, v.message) for v in verdicts if v.outcome in (CheckOutcome.FAILED, CheckOutcome.HUNG)]
    assert not wrong
    assert {verdict.id for verdict in verdicts if verdict.outcome is CheckOutcome.SKIPPED} == skipped
