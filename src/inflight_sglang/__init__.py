"""SGLang as an inference backend: an endpoint over SGLang's own routes. Nothing is installed in the engine.

Importing this package loads neither SGLang nor torch.
"""

from inflight_sglang.endpoint import SglangEndpoint
from inflight_sglang.kind import KIND

__all__ = ["KIND", "SglangEndpoint"]
