"""vLLM behind the inference contract: an endpoint over vLLM's own routes, and a plug-in for the engine's processes.

Importing this package loads neither vLLM nor torch. Only `inflight_vllm.transfer_engine` and `inflight_vllm.reloading`
import vLLM, and only vLLM loads them.
"""

from inflight_vllm.endpoint import VllmEndpoint
from inflight_vllm.kind import KIND

__all__ = ["KIND", "VllmEndpoint"]
