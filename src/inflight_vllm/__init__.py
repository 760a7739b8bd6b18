"""vLLM behind the inference contract: an endpoint over vLLM's own routes, and a plug-in for the engine's processes.

Importing this package loads neither vLLM nor torch; `inflight_vllm.transfer_engine` is the only module that imports
vLLM, and only vLLM loads it.
"""

from inflight_vllm.endpoint import VllmEndpoint
from inflight_vllm.flags import KIND

__all__ = ["KIND", "VllmEndpoint"]
