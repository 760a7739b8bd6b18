"""The counters of an engine: steps, tokens, requests, updates and drafts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineCounters:
    """Counts since the engine was created. The engine's thread writes them, and any thread may read them."""

    num_steps: int = 0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_finished: int = 0
    num_updates: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_verifications: int = 0
    num_scored_tokens: int = 0
