"""How to start a vLLM server, and how to attach to one by its URL."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from inflight.contracts import DraftProvider, EngineKind, EngineOptions, GpuUse, InferenceEndpoint
from inflight.engines.arguments import has_gpu, integer_in, number_in
from inflight_vllm import flags
from inflight_vllm.endpoint import VllmEndpoint

_SEVERAL_RANKS = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--distributed-executor-backend")

_MEMORY_SHARE = 0.92
"""vLLM's own default, ``CacheConfig.gpu_memory_utilization`` in 0.32."""


class VllmKind(EngineKind):
    """vLLM's own server."""

    name = "vllm"
    liveness_path = "/health"
    release_arguments = flags.RELEASE_ARGUMENTS

    def command(self, options: EngineOptions, host: str, port: int) -> list[str]:
        """Return a command that runs the module, because the script ``vllm`` fails in CPU builds."""
        words = ["-m", flags.MODULE, "--model", str(options.model), "--host", host, "--port", str(port)]
        words += ["--served-model-name", options.name or options.model.resolve().name]
        for flag, value in (
            ("--dtype", options.dtype),
            ("--max-model-len", options.max_model_len),
            ("--max-num-seqs", options.max_concurrent),
        ):
            if value is not None:
                words += [flag, str(value)]
        if not has_gpu(options.device):
            words.append("--enforce-eager")  # compiling gains nothing on a CPU
            words.append("--no-enable-chunked-prefill")  # see `flags.honours_seeds`
            if not any(word.startswith(_SEVERAL_RANKS) for word in options.arguments):
                # Saves a process, and avoids busy-waiting for messages, which starves all other processes for seconds.
                words += ["--distributed-executor-backend", "uni"]
        words += flags.needed_arguments()
        if options.drafts is not None:
            words += flags.drafting_arguments()
        return [*words, *options.arguments]

    def environment(self, options: EngineOptions) -> Mapping[str, str]:
        variables = {flags.DEV_MODE: "1", "VLLM_NO_USAGE_STATS": "1"}
        if not has_gpu(options.device):
            variables["VLLM_CPU_KVCACHE_SPACE"] = "1"
            variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # without it vLLM refuses the uni executor on a CPU
            variables["TORCHDYNAMO_DISABLE"] = "1"  # otherwise the logprobs' helper compiles C++ while serving
        if options.threads is not None:
            variables |= {"OMP_NUM_THREADS": str(options.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return variables

    def drafts_problem(self, provider: DraftProvider) -> str | None:
        return None if provider == "history" else "vLLM drafts only from recorded completions; choose 'history'"

    def gpu_use(self, arguments: Sequence[str]) -> GpuUse:
        sharding = (
            integer_in(arguments, "--tensor-parallel-size", "-tp"),
            integer_in(arguments, "--pipeline-parallel-size", "-pp"),
        )
        copies = integer_in(arguments, "--data-parallel-size", "-dp") or 1
        return GpuUse(
            num_gpus=copies * math.prod(size or 1 for size in sharding),
            num_copies=copies,
            memory_share=number_in(arguments, "--gpu-memory-utilization") or _MEMORY_SHARE,
            context=integer_in(arguments, "--max-model-len"),
            stages_on_gpu=True,
        )

    def connect(
        self, url: str, *, token: str | None, control_timeout_s: float, generate_timeout_s: float
    ) -> InferenceEndpoint:
        """Return an endpoint for a vLLM server; ``token`` is the value of vLLM's ``--api-key``."""
        return VllmEndpoint(
            url, api_key=token, control_timeout_s=control_timeout_s, generate_timeout_s=generate_timeout_s
        )


KIND = VllmKind()
"""The engine kind `vllm`."""
