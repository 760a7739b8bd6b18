"""vLLM as an inference backend: an endpoint over vLLM's own routes, and a plug-in for the engine's processes.

Importing this package loads neither vLLM nor torch. The modules that import vLLM are loaded only by vLLM:
`transfer_engine`, `engine_core`, `streamed_versions`, `stop_strings`, `reloading`, `traced_loads`, `ready_layers` and
`verification`.
"""

from inflight_vllm.endpoint import VllmEndpoint
from inflight_vllm.four_phases import FOUR_PHASES, FourPhaseEndpoint
from inflight_vllm.kind import KIND

__all__ = ["FOUR_PHASES", "KIND", "FourPhaseEndpoint", "VllmEndpoint"]
