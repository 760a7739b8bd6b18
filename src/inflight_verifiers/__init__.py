"""Tasksets of verifiers as environments, ``task.name = "verifiers"``.

It is a package of its own because verifiers finds a harness by the name of a top-level module:
``harness = { id = "inflight_verifiers" }`` is `ChatLoop`.
"""

from inflight_verifiers.environment import VerifiersEnvironment
from inflight_verifiers.harness import ChatLoop, ChatLoopConfig

__all__ = ["ChatLoop", "ChatLoopConfig", "VerifiersEnvironment"]
