"""The packages: what importing loads, which names are public, and which part may import which."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import inflight

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"

ENGINES = ("vllm", "sglang")
HEAVY = ("torch", "transformers", "starlette", "uvicorn", "safetensors", *ENGINES)

PUBLIC_NAMES = {
    "inflight": [
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
    ],
    "inflight.conformance": [
        "Certificate",
        "Check",
        "CheckOutcome",
        "EndpointTarget",
        "Kit",
        "TransportTarget",
        "Verdict",
        "WorkerTarget",
        "endpoint_checks",
        "transport_checks",
        "worker_checks",
    ],
    "inflight.launchers": ["Launched", "Launcher", "LocalLauncher", "ProcessEnd", "Program", "load_launcher"],
    "inflight.planning": [
        "Endpoint",
        "Prompted",
        "PublishCost",
        "Setup",
        "SimulationResult",
        "TokenTime",
        "TrainerCost",
        "simulate",
    ],
    "inflight.losses": [
        "Aggregation",
        "Band",
        "Budget",
        "Constant",
        "Correction",
        "Counts",
        "CrossEntropy",
        "Distillation",
        "Entropy",
        "Gate",
        "GeometricMean",
        "KeptTokens",
        "Kl",
        "LossOutput",
        "LossPlan",
        "MaxAge",
        "Maximum",
        "Metric",
        "Metrics",
        "Opsm",
        "PRESETS",
        "Penalty",
        "PolicyLoss",
        "PositiveUnclipped",
        "PpoClip",
        "Preset",
        "PromptMean",
        "Sapo",
        "Score",
        "SecondMoment",
        "SegmentMean",
        "SegmentSum",
        "SquaredLogRatio",
        "Sum",
        "TeacherKl",
        "TokenMean",
        "Truncate",
        "TrustKl",
        "TrustTv",
        "Vespo",
        "add_metrics",
        "chunked_logprobs",
        "chunked_logprobs_and_entropy",
        "collate",
        "decode_metrics",
        "effective_sample_size",
        "empty_micro_batch",
        "encode_metrics",
        "grpo_loss",
        "metric_values",
        "one_pass",
        "prepare",
        "preset",
        "ratio_metrics",
        "reinforce_loss",
        "staleness_metrics",
    ],
    "inflight.rollouts": [
        "AdvantageEstimator",
        "Credit",
        "EssGuard",
        "HistoryStore",
        "Ledger",
        "MaxLag",
        "TokenBudget",
        "TurnCritic",
        "WaitingGroups",
        "batch_advantages",
        "continuation",
        "group_advantages",
        "has_signal",
        "joined",
        "load_composer",
        "load_scheduler",
        "load_staleness",
        "load_task",
        "overlong_penalty",
        "pack",
        "sample_pairs",
        "shuffle_batch",
        "teaches",
        "token_advantages",
        "trained_mask",
        "within_budget",
    ],
    "inflight.observe.trackers": ["Reporting", "TrackedRun", "Tracker", "load_trackers"],
    "inflight.contracts": [
        "AbortingEndpoint",
        "AdjustableWorker",
        "BackgroundSaver",
        "BatchComposer",
        "Conversation",
        "CountingEndpoint",
        "DEFAULT_MAX_CONCURRENT",
        "DataRanks",
        "DraftProvider",
        "DraftingEndpoint",
        "EMBEDDED",
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
    ],
    "inflight.wire": [
        "AbortRequests",
        "Acknowledgement",
        "Box",
        "BucketSpec",
        "BucketTransfer",
        "Capabilities",
        "ChatAnswer",
        "ChatChoice",
        "ChatChunkChoice",
        "ChatCompletion",
        "ChatCompletionChunk",
        "ChatCompletionRequest",
        "ChatDelta",
        "ChatLogprobs",
        "ChatMessage",
        "ChatTokenLogprob",
        "ChatUsage",
        "Completion",
        "CompletionChunk",
        "DTYPE_SIZES",
        "DirectorySpec",
        "DraftCounts",
        "DraftHistory",
        "Encoding",
        "EndpointState",
        "ErrorBody",
        "ErrorDetail",
        "FinishReason",
        "GenerateRequest",
        "GenerateResponse",
        "Health",
        "HttpFileSpec",
        "ImageAddress",
        "ImagePart",
        "ImageUrl",
        "InFlightPolicy",
        "IpcSpec",
        "Items",
        "LoraSpec",
        "MAX_ABORTED",
        "MAX_ALTERNATIVES",
        "MAX_IMAGES",
        "MAX_IMAGES_LENGTH",
        "MAX_REWARD",
        "MIN_TEMPERATURE",
        "Manifest",
        "ModelCard",
        "ModelList",
        "Natural",
        "Needs",
        "PROTOCOL_VERSION",
        "ProcessGroupSpec",
        "PromptHistory",
        "PromptImage",
        "RequestId",
        "RoutedExperts",
        "RunId",
        "SamplingParams",
        "ScoreRequest",
        "ScoreResponse",
        "Seconds",
        "Seed",
        "SentBytes",
        "Sharding",
        "StopString",
        "TensorSpec",
        "TextPart",
        "TokenCount",
        "TokenId",
        "TransportBody",
        "TransportName",
        "TransportSpec",
        "UpdateMessage",
        "UpdateRef",
        "UpdateTimings",
        "VersionSpan",
        "WeightUpdate",
        "WeightVersion",
        "WireModel",
        "box_size",
        "check_images",
        "check_spans",
        "is_empty",
        "is_reward",
        "longest_record",
    ],
    "inflight_fsdp": [
        "DEEPSPEED",
        "FSDP",
        "FsdpLoraWorker",
        "FsdpWorker",
        "MEGATRON",
        "TORCHTITAN",
        "WorkerConfig",
        "create_worker",
    ],
    "inflight_sglang": ["KIND", "SglangEndpoint"],
    "inflight_vllm": ["FOUR_PHASES", "FourPhaseEndpoint", "KIND", "VllmEndpoint"],
}

ORDER = (
    "errors",
    "types",
    "wire",
    "contracts",
    "base",
    "model",
    "losses",
    "rollouts",
    "http",
    "weights",
    "environments",
    "engines",
    "dialects",
    "launchers",
    "observe",
    "run",
    "conformance",
    "bench",
    "replay",
    "doctor",
    "planning",
    "commands",
    "cli",
    "__main__",
)
"""Each package and module at the top imports only those before it. The namespace ``inflight`` comes after ``http``."""

OF_ADAPTERS = ORDER[: ORDER.index("dialects")]
"""What an adapter may import of the core."""

TORCH_FREE = (
    "errors",
    "types",
    "wire",
    "contracts",
    "base",
    "http",
    "engines",
    "launchers",
    "environments",
    "dialects",
    "rollouts",
    "observe/exports",
    "commands",
    "cli.py",
    "__main__.py",
    "__init__.py",
    "model/images.py",
)
"""Where torch is not imported at import time."""
TORCH_WITHIN_TORCH_FREE = (
    "engines/embedded",
    "dialects/broadcast_group.py",
    "dialects/fast_llm",
    "dialects/pipelinerl",
    "dialects/tinker",
)
"""Of these, where it is imported at import time after all: what imports them needs it."""
TORCH_ON_USE = (
    "engines/embedded",
    "dialects/broadcast_group.py",
    "dialects/fast_llm",
    "dialects/pipelinerl",
    "dialects/tinker",
    "model/images.py",
    "commands",
    "cli.py",
    "__main__.py",
    "__init__.py",
)
"""Of these, where functions import it."""


@dataclass(frozen=True)
class Import:
    """One imported module. ``on_use``: within a function; ``for_types``: never at run time."""

    file: Path
    module: str
    on_use: bool
    for_types: bool


@functools.cache
def imports_of(file: Path) -> tuple[Import, ...]:
    """Every import statement, ``from package import module`` as ``package.module``; relative ones are refused."""

    def walk(node: ast.AST, on_use: bool, for_types: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            is_guard = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(file, alias.name, on_use, for_types)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{file} imports relatively"
                assert child.module is not None
                for alias in child.names:
                    is_module = (SRC / child.module.replace(".", "/") / f"{alias.name}.py").exists()
                    is_package = (SRC / child.module.replace(".", "/") / alias.name / "__init__.py").exists()
                    name = f"{child.module}.{alias.name}" if is_module or is_package else child.module
                    yield Import(file, name, on_use, for_types)
            else:
                yield from walk(child, on_use or is_function, for_types or is_guard)

    return tuple(walk(ast.parse(file.read_text()), False, False))


def part_of(file: Path) -> str:
    """``src/inflight/http/client.py`` is of the part ``http``."""
    parts = file.relative_to(SRC / "inflight").parts
    return parts[0].removesuffix(".py")


def core_files() -> list[Path]:
    return sorted((SRC / "inflight").rglob("*.py"))


def adapters() -> list[Path]:
    return sorted(path for path in SRC.iterdir() if path.is_dir() and path.name.startswith("inflight_"))


def run_python(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


# ---------------------------------------------------------------------------------------------------------------
# What importing loads


@pytest.mark.parametrize(
    "module",
    [
        "inflight",
        "inflight.rollouts",
        "inflight.cli",
        "inflight.http.client",
        "inflight.http.openapi",
        "inflight.contracts",
    ],
)
def test_importing_loads_neither_torch_nor_an_engine_nor_a_server(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert run_python(code) == "[]\n"


def test_importing_has_no_effect_on_logging_signals_threads_or_the_environment() -> None:
    code = """
import logging, os, signal, sys, threading
def state():
    return (
        dict(os.environ), list(logging.root.handlers), logging.root.level, threading.active_count(),
        [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)], list(sys.path), list(sys.meta_path)
    )
import h11, httpx, pydantic  # what they do is not our doing
before = state()
import inflight, inflight.http.openapi, inflight.rollouts, inflight.cli
print(before == state())
"""
    assert run_python(code) == "True\n"


def test_names_that_need_torch_are_loaded_when_they_are_used() -> None:
    code = """
import sys, inflight
inflight.group_advantages
assert "torch" not in sys.modules
from inflight import grpo_loss, publish_weights, WeightPublisher, reinforce_loss
assert "torch" in sys.modules
assert "transformers" not in sys.modules
try:
    inflight.nonsense
except AttributeError as error:
    print(error)
"""
    assert run_python(code) == "module 'inflight' has no attribute 'nonsense'\n"


# ---------------------------------------------------------------------------------------------------------------
# Public names


def test_the_public_names_are_exactly_these_and_all_of_them_exist() -> None:
    assert sorted(inflight.__all__) == PUBLIC_NAMES["inflight"]
    assert sorted(name for name in dir(inflight)) == PUBLIC_NAMES["inflight"]
    for name in inflight.__all__:
        assert getattr(inflight, name) is not None
    namespace: dict[str, object] = {}
    exec("from inflight import *", namespace)
    assert set(PUBLIC_NAMES["inflight"]) <= set(namespace)


def packages_with_public_names() -> list[str]:
    """Packages under ``src`` whose ``__init__`` specifies ``__all__``."""
    inits = sorted(SRC.rglob("__init__.py"))
    return [".".join(init.parent.relative_to(SRC).parts) for init in inits if "__all__" in init.read_text()]


@pytest.mark.parametrize("package", packages_with_public_names())
def test_a_package_exports_its_public_names_and_no_others(package: str) -> None:
    module = importlib.import_module(package)
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert hasattr(module, name), name
    assert sorted(module.__all__) == PUBLIC_NAMES[package]


def test_the_version_is_that_of_the_project_file() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert inflight.__version__ == project["version"]


# ---------------------------------------------------------------------------------------------------------------
# Arrows


def test_the_order_names_every_part_of_the_core() -> None:
    assert sorted({part_of(file) for file in core_files()} - {"__init__"}) == sorted(ORDER)


def test_packages_import_only_those_before_them() -> None:
    wrong = []
    for file in core_files():
        part = part_of(file)
        place = ORDER.index("weights") if part == "__init__" else ORDER.index(part)
        for found in imports_of(file):
            names = found.module.split(".")
            # `from inflight import __version__` comes from the namespace itself, which every part may name.
            is_of_the_core = names[0] == "inflight" and len(names) > 1
            # What the namespace loads on use may be anything.
            if is_of_the_core and not found.for_types and ORDER.index(names[1]) > place:
                wrong.append(f"{file.relative_to(SRC)} imports {found.module}")
    assert wrong == []


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    imported: dict[str, set[str]] = {}
    for file in SRC.rglob("*.py"):
        parts = file.relative_to(SRC).with_suffix("").parts
        module = ".".join(parts).removesuffix(".__init__")
        # Importing a module imports the packages that it is in, too.
        found = {name for it in imports_of(file) for name in (it.module, *packages_of(it.module))}
        imported[module] = found - set(packages_of(module))
    while leaves := {module for module, others in imported.items() if not others & (imported.keys() - {module})}:
        imported = {module: others for module, others in imported.items() if module not in leaves}
    assert sorted(imported) == []


def packages_of(module: str) -> Iterator[str]:
    """The packages that a module is in, outermost first."""
    parts = module.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts)))


def is_in(file: Path, parts: tuple[str, ...]) -> bool:
    path = file.relative_to(SRC / "inflight")
    return any(path == Path(part) or path.is_relative_to(part) for part in parts)


def test_torch_is_imported_only_where_it_is_needed() -> None:
    imports = [
        found
        for file in core_files()
        if is_in(file, TORCH_FREE)
        for found in imports_of(file)
        if found.module.split(".")[0] in ("torch", "transformers", "numpy") and not found.for_types
    ]
    loaded = [
        f"{found.file.relative_to(SRC)} imports {found.module}"
        for found in imports
        if not found.on_use and not is_in(found.file, TORCH_WITHIN_TORCH_FREE)
    ]
    assert loaded == []
    used = [
        f"{found.file.relative_to(SRC)} imports {found.module}"
        for found in imports
        if found.module.split(".")[0] != "numpy" and not is_in(found.file, TORCH_ON_USE)
    ]
    assert used == [], "not even when used"


def test_one_module_knows_ray() -> None:
    imports = [found for file in core_files() for found in imports_of(file)]
    knowing = {found.file.relative_to(SRC) for found in imports if found.module.split(".")[0] == "ray"}
    assert knowing == {Path("inflight/launchers/ray.py")}


def test_the_core_imports_no_adapter_and_no_engine() -> None:
    forbidden = {*ENGINES, *(adapter.name for adapter in adapters())}
    wrong = [
        f"{file.relative_to(SRC)} imports {found.module}"
        for file in core_files()
        for found in imports_of(file)
        if found.module.split(".")[0] in forbidden
    ]
    assert wrong == []


@pytest.mark.parametrize("adapter", adapters(), ids=lambda adapter: adapter.name)
def test_an_adapter_imports_the_core_only(adapter: Path) -> None:
    wrong = []
    for file in sorted(adapter.rglob("*.py")):
        for found in imports_of(file):
            names = found.module.split(".")
            is_other_adapter = names[0].startswith("inflight_") and names[0] != adapter.name
            is_no_core = names[0] == "inflight" and len(names) > 1 and names[1] not in OF_ADAPTERS
            if is_other_adapter or is_no_core:
                wrong.append(f"{file.relative_to(SRC)} imports {found.module}")
    assert wrong == []


# ---------------------------------------------------------------------------------------------------------------
# Documents


def test_the_openapi_document_in_docs_is_that_of_the_routes() -> None:
    from inflight.http.openapi import openapi_document

    written = json.loads((ROOT / "docs" / "openapi.json").read_text())
    assert written == json.loads(json.dumps(openapi_document())), (
        "run python -m inflight.http.openapi > docs/openapi.json"
    )
