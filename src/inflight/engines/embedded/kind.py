"""The embedded engine as an `EngineKind` that runs in the serving process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from inflight.contracts import EMBEDDED, DraftProvider, EngineKind, EngineOptions, GpuUse, InferenceEndpoint
from inflight.http.client import HttpEndpoint


class EmbeddedKind(EngineKind):
    """The embedded engine, `inflight.engines.embedded`."""

    name = EMBEDDED
    runs_in_process = True
    unsupported_options = ("arguments",)
    releases_memory = "anywhere"

    def drafts_problem(self, provider: DraftProvider) -> str | None:
        return None

    def gpu_use(self, arguments: Sequence[str]) -> GpuUse:
        return GpuUse(memory_share=None, stages_on_gpu=True)

    def load(self, options: EngineOptions) -> InferenceEndpoint:
        """Load the model. Also set the number of torch threads in this process, if the options specify it."""
        import torch

        from inflight.engines.embedded.loading import load_endpoint

        settings = dataclasses.asdict(options.with_defaults())
        threads, _ = settings.pop("threads"), settings.pop("arguments")
        if threads is not None:
            torch.set_num_threads(threads)
        return load_endpoint(settings.pop("model"), **settings)

    def connect(
        self, url: str, *, token: str | None, control_timeout_s: float, generate_timeout_s: float
    ) -> InferenceEndpoint:
        """Return an `HttpEndpoint`, because the embedded engine's server implements the contract."""
        return HttpEndpoint(
            url, token=token, control_timeout_s=control_timeout_s, generate_timeout_s=generate_timeout_s
        )


KIND = EmbeddedKind()
