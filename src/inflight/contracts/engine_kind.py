"""The Protocol of an engine: how to start its server or attach to a running one, and how the server uses GPUs.

Adapters register an `EngineKind` under the entry point group ``inflight.engines``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from inflight.contracts.endpoint import InferenceEndpoint
from inflight.errors import ConfigError

EMBEDDED = "embedded"
"""Name of the engine that a server uses by default."""
DEFAULT_MAX_CONCURRENT = 64
"""Number of sequences that a server decodes at a time by default."""

DraftProvider = Literal["history", "siblings", "both"]
"""The source of drafts: recorded completions of the same prompt, other completions on this server, or both."""


def option(help: str, default: Any = None, **more: Any) -> Any:
    """Return a dataclass field that is an option of ``inflight serve``, with its help text.

    ``more`` may set ``metavar``, ``choices`` and ``flag``, which defaults to the field's name.
    """
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """A user's settings for an engine that inflight starts. None leaves the choice to the engine."""

    model: Path
    """Hugging Face checkpoint directory."""
    name: str | None = option("name of the served model (default: the name of MODEL_DIR)")
    dtype: str | None = option(
        "dtype of the weights and the computation (default: the dtype of the checkpoint)",
        choices=("float32", "bfloat16", "float64"),
    )
    device: str | None = option("device to compute on: cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    max_model_len: int | None = option("maximum number of tokens in a sequence (default: the model's limit)")
    max_concurrent: int | None = option(
        f"maximum number of sequences to decode at a time (default: {DEFAULT_MAX_CONCURRENT})"
    )
    kv_cache_bytes: int | None = option(
        "memory limit of the KV cache, such as 2GB; requests wait for free memory (default: enough for "
        "--max-concurrent sequences of --max-model-len tokens, at most half of the memory; embedded engine only)",
        flag="kv-cache",
        metavar="SIZE",
    )
    compile: bool = option(
        "compile the decode step before serving, and capture CUDA graphs on a GPU (embedded engine only)", False
    )
    drafts: DraftProvider | None = option(
        "where speculative drafts come from: recorded completions of the same prompt (history), other completions on "
        "this server (siblings), or both (default: off; vLLM supports only history, SGLang none)"
    )
    threads: int | None = option("number of CPU threads of the engine (default: chosen by the engine)")
    arguments: tuple[str, ...] = option(
        "argument to pass to the engine's own command line, or KEY=VALUE for a function; may be repeated",
        (),
        flag="engine-arg",
        metavar="=ARG",
    )

    @property
    def num_slots(self) -> int:
        """Return how many sequences are decoded at a time."""
        return DEFAULT_MAX_CONCURRENT if self.max_concurrent is None else self.max_concurrent

    def with_defaults(self) -> EngineOptions:
        """Return these options with defaults for ``name`` and ``max_concurrent``, which the engine does not choose."""
        return replace(self, name=self.name or self.model.resolve().name, max_concurrent=self.num_slots)


@dataclass(frozen=True, slots=True)
class GpuUse:
    """The use of GPUs by one server."""

    num_gpus: int = 1
    num_copies: int = 1
    """Number of copies of the model on these GPUs, each sharded over the same number of GPUs."""
    memory_share: float | None = 0.9
    """Share of each GPU's memory that the engine fills with weights, KV cache and activations. If it is None, the
    engine uses as much as the weights and sequences need."""
    context: int | None = None
    """Length of the longest sequence in tokens; None means the model's maximum."""
    stages_on_gpu: bool = False
    """Whether an update that arrives over NCCL or CUDA IPC is kept whole in each GPU's memory until the commit."""


class EngineKind(Protocol):
    """One kind of engine. Instances hold no state.

    An engine either runs in the process that serves it (`runs_in_process`, `load`), or in a separate process
    (`command`, `environment`, `health_path`, `liveness_path`). An engine that does neither can only be attached to.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name of the entry point, such as ``vllm``."""

    @property
    def runs_in_process(self) -> bool:
        """Return whether the engine runs in the process that serves it, and can load the versions that a run stores.

        Runs with ``updates.mode = "pull"`` need such an engine.
        """
        return False

    @property
    def unsupported_options(self) -> Collection[str]:
        """Return the fields of `EngineOptions` that do not apply to this engine."""
        return ("kv_cache_bytes", "compile")

    @property
    def release_arguments(self) -> Sequence[str]:
        """Return the command-line arguments that enable a server on a GPU to release its memory."""
        return ()

    @property
    def releases_memory(self) -> Literal["never", "on_gpu", "anywhere"]:
        """Return on which devices a server started with `release_arguments` can release its memory."""
        return "on_gpu" if self.release_arguments else "never"

    def drafts_problem(self, provider: DraftProvider) -> str | None:
        """Return why no server of this kind can draft from ``provider``, or None if they can."""
        return f"the adapter of {self.name} does not support drafts; omit drafts"

    def gpu_use(self, arguments: Sequence[str]) -> GpuUse:
        """Return how a server uses GPUs, given the additional arguments on its command line."""
        return GpuUse()

    def load(self, options: EngineOptions) -> InferenceEndpoint:
        """Return an endpoint with a running engine in this process. Raises `ConfigError` if it cannot be loaded."""
        raise ConfigError(f"{self.name} does not run in the process that serves it, so it cannot be loaded there")

    def command(self, options: EngineOptions, host: str, port: int) -> list[str]:
        """Return the arguments with which the Python interpreter starts a server that inflight can attach to."""
        raise ConfigError(
            f"inflight does not start {self.name}: attach to a running server with {self.name}+http://HOST:PORT"
        )

    def environment(self, options: EngineOptions) -> Mapping[str, str]:
        """Return the environment variables that the server needs in addition to the inherited ones."""
        return {}

    @property
    def health_path(self) -> str:
        """Return the path that answers with status 200 once the server can generate."""
        return "/health"

    @property
    def liveness_path(self) -> str | None:
        """Return the path that answers in milliseconds, with status 503 once a part of the engine has died.

        None if the server has no such path. A path that samples a token does not qualify, nor does one that does not
        answer during a pause.
        """
        return None

    @abstractmethod
    def connect(
        self, url: str, *, token: str | None, control_timeout_s: float, generate_timeout_s: float
    ) -> InferenceEndpoint:
        """Return an endpoint for the engine's own server at ``url``. Sends nothing before the endpoint's first call."""
