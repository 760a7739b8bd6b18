"""Version labels in every output of vLLM, which itself adds them only to the last one. Only vLLM loads this."""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.engine.output_processor import RequestState

_REPLACED = "inflight_labels_streams"


def register() -> None:
    """Make each output of a request carry the labels of all its tokens so far, those of earlier outputs included.

    vLLM records the label of each step before it makes the output of that step.
    """
    without_labels = RequestState._new_completion_output
    if hasattr(without_labels, _REPLACED):
        return

    @functools.wraps(without_labels)
    def _new_completion_output(state: Any, token_ids: Any, finish_reason: Any, stop_reason: Any) -> Any:
        output = without_labels(state, token_ids, finish_reason, stop_reason)
        output.weight_versions = state._weight_version_spans()
        return output

    setattr(_new_completion_output, _REPLACED, True)
    RequestState._new_completion_output = _new_completion_output
