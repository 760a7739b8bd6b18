"""The contracts of inflight, defined as Protocols.

An endpoint is one inference server seen from outside; its methods are async. A worker is one trainer rank; its methods
are sync and SPMD: every rank makes the same calls in the same order. Any endpoint and any worker that satisfy these
Protocols and the requirements of docs/contract.md work together.
"""

from inflight.contracts.endpoint import (
    AbortingEndpoint,
    CountingEndpoint,
    DraftingEndpoint,
    InferenceEndpoint,
    ReleasingEndpoint,
    ScoringEndpoint,
    StreamingEndpoint,
)
from inflight.contracts.engine_kind import (
    DEFAULT_MAX_CONCURRENT,
    EMBEDDED,
    DraftProvider,
    EngineKind,
    EngineOptions,
    GpuUse,
)
from inflight.contracts.environment import (
    Conversation,
    Environment,
    Episode,
    Task,
)
from inflight.contracts.policies import (
    BatchComposer,
    LengthPredictor,
    Scheduler,
    StalenessPolicy,
)
from inflight.contracts.trainer import (
    AdjustableWorker,
    BackgroundSaver,
    DataRanks,
    ImageWorker,
    LoraSource,
    MemoryTerm,
    MergingLoraSource,
    ModelParallelWorker,
    PartialWeightSource,
    PrefixSharingWorker,
    ReplayingWorker,
    ShardedWeightSource,
    TargetScoringWorker,
    TrainerWorker,
    TrainingLoad,
    WeightSource,
    WorkerKind,
    data_ranks_of,
)
from inflight.contracts.transport import (
    ReceivesAhead,
    ReservesMemory,
    SendsFromDevice,
    Transport,
    WeightReceiver,
    WeightSender,
)

__all__ = [
    "DEFAULT_MAX_CONCURRENT",
    "EMBEDDED",
    "AbortingEndpoint",
    "AdjustableWorker",
    "BackgroundSaver",
    "BatchComposer",
    "Conversation",
    "CountingEndpoint",
    "DataRanks",
    "DraftProvider",
    "DraftingEndpoint",
    "EngineKind",
    "EngineOptions",
    "Environment",
    "Episode",
    "GpuUse",
    "ImageWorker",
    "InferenceEndpoint",
    "LengthPredictor",
    "LoraSource",
    "MemoryTerm",
    "MergingLoraSource",
    "ModelParallelWorker",
    "PartialWeightSource",
    "PrefixSharingWorker",
    "ReceivesAhead",
    "ReleasingEndpoint",
    "ReplayingWorker",
    "ReservesMemory",
    "Scheduler",
    "ScoringEndpoint",
    "SendsFromDevice",
    "ShardedWeightSource",
    "StalenessPolicy",
    "StreamingEndpoint",
    "TargetScoringWorker",
    "Task",
    "TrainerWorker",
    "TrainingLoad",
    "Transport",
    "WeightReceiver",
    "WeightSender",
    "WeightSource",
    "WorkerKind",
    "data_ranks_of",
]
