"""Faults in releasing and restoring memory."""

from __future__ import annotations

from typing import Any

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.wire import EndpointState, WeightUpdate, WeightVersion
from tests.conformance.mutants.mutant import Mutant
from tests.conformance.mutants.patches import replaces, with_capabilities


@replaces("_engine.free_memory")
def ends_requests(endpoint: EmbeddedEndpoint, own: Any) -> None:
    endpoint._engine.scheduler.cancel_all()
    own()


def samples_while_released(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    session: Any = endpoint._updates.session
    session.refuse_to_sample = lambda: None
    return endpoint


@replaces("request_weight_update")
async def restores_for_an_update(endpoint: EmbeddedEndpoint, own: Any, update: WeightUpdate) -> None:
    await endpoint.restore_memory()
    await own(update)


@replaces("weight_version")
async def reports_ready(endpoint: EmbeddedEndpoint, own: Any) -> WeightVersion:
    version = await own()
    is_released = version.state is EndpointState.RELEASED
    return version.model_copy(update={"state": EndpointState.READY}) if is_released else version


def comes_back_with_the_checkpoint(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    engine: Any = endpoint._engine
    stored = {name: parameter.detach().clone() for name, parameter in engine.weights.by_name.items()}

    def take_memory() -> None:
        for name, parameter in engine.weights.by_name.items():
            parameter.data = stored[name]

    engine.take_memory = take_memory
    return endpoint


MUTANTS = (
    Mutant("release ends requests", "E-64", "A release of memory ends running requests.", ends_requests),
    Mutant(
        "unsupported release",
        "E-64",
        "Memory is released by an endpoint that does not support it.",
        with_capabilities(releases_memory=False),
    ),
    Mutant("samples while released", "E-65", "Requests are sampled while memory is released.", samples_while_released),
    Mutant("restores for an update", "E-65", "An update restores the memory on its own.", restores_for_an_update),
    Mutant("released in secret", "E-65", "The state is ready while memory is released.", reports_ready),
    Mutant(
        "checkpoint after a restore",
        "E-66",
        "A restore loads the weights that the server was started with.",
        comes_back_with_the_checkpoint,
    ),
)
