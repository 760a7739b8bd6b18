"""inflight: contracts that connect any inference engine to any trainer, with weights that change during generation.

Importing this package loads neither torch nor an engine. Names that need torch load it when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from inflight import errors, types, wire
from inflight.contracts import (
    AbortingEndpoint,
    BackgroundSaver,
    Conversation,
    Environment,
    Episode,
    InferenceEndpoint,
    ModelParallelWorker,
    ReleasingEndpoint,
    StreamingEndpoint,
    Task,
    TrainerWorker,
    WeightReceiver,
    WeightSender,
    WeightSource,
)
from inflight.http.client import HttpEndpoint
from inflight.http.kinds import connect_endpoint
from inflight.types import PublishReport
from inflight.wire import GenerateRequest, GenerateResponse, SamplingParams

if TYPE_CHECKING:
    from inflight.losses.plain import grpo_loss, reinforce_loss
    from inflight.rollouts.advantages import group_advantages
    from inflight.weights.receive.following import follow
    from inflight.weights.receive.receiver import UpdateReceiver
    from inflight.weights.send.fleet import Fleet
    from inflight.weights.send.gathering import gather_only
    from inflight.weights.send.module import LoraWeights, ModuleWeights
    from inflight.weights.send.publisher import WeightPublisher, publish_weights
    from inflight.weights.send.ranks import PartSender
    from inflight.weights.send.storing import store_weights

__version__ = "0.1.0"

__all__ = [
    "AbortingEndpoint",
    "BackgroundSaver",
    "Conversation",
    "Environment",
    "Episode",
    "Fleet",
    "GenerateRequest",
    "GenerateResponse",
    "HttpEndpoint",
    "InferenceEndpoint",
    "LoraWeights",
    "ModelParallelWorker",
    "ModuleWeights",
    "PartSender",
    "PublishReport",
    "ReleasingEndpoint",
    "SamplingParams",
    "StreamingEndpoint",
    "Task",
    "TrainerWorker",
    "UpdateReceiver",
    "WeightPublisher",
    "WeightReceiver",
    "WeightSender",
    "WeightSource",
    "__version__",
    "connect_endpoint",
    "errors",
    "follow",
    "gather_only",
    "group_advantages",
    "grpo_loss",
    "publish_weights",
    "reinforce_loss",
    "store_weights",
    "types",
    "wire",
]

_LOADED_ON_USE = {
    "LoraWeights": "inflight.weights.send.module",
    "Fleet": "inflight.weights.send.fleet",
    "follow": "inflight.weights.receive.following",
    "ModuleWeights": "inflight.weights.send.module",
    "UpdateReceiver": "inflight.weights.receive.receiver",
    "PartSender": "inflight.weights.send.ranks",
    "WeightPublisher": "inflight.weights.send.publisher",
    "gather_only": "inflight.weights.send.gathering",
    "publish_weights": "inflight.weights.send.publisher",
    "group_advantages": "inflight.rollouts.advantages",
    "grpo_loss": "inflight.losses.plain",
    "reinforce_loss": "inflight.losses.plain",
    "store_weights": "inflight.weights.send.storing",
}


def __getattr__(name: str) -> Any:
    if name in _LOADED_ON_USE:
        return getattr(importlib.import_module(_LOADED_ON_USE[name]), name)
    raise AttributeError(f"module 'inflight' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
