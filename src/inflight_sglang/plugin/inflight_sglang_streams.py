"""Version labels in every streamed output of SGLang, which itself adds them only to the last one. Only SGLang loads it.

`inflight serve` puts this directory on the path of the server that it starts, where SGLang finds it as a plug-in. No
part of inflight is imported here, because inflight need not be installed in SGLang's environment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ACCEPT = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept"


def register() -> None:
    """Make each output of a streamed request carry the labels of all its tokens so far."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(ACCEPT, accept_with_labels, HookType.AROUND)


def accept_with_labels(accept: Callable[..., None], outputs: Any, *, req: Any) -> None:
    """Accept a request's new tokens into the outputs of a step, with the labels of all its tokens so far."""
    from sglang.srt.utils.weight_versions import compute_weight_version_spans

    num = len(outputs.weight_versions)
    accept(outputs, req=req)
    if req.stream and len(outputs.weight_versions) > num and outputs.weight_versions[-1] is None:
        outputs.weight_versions[-1] = compute_weight_version_spans(
            req.weight_version_events,
            current_version=outputs.current_weight_version,
            num_output_tokens=len(req.output_ids_through_stop),
        )
