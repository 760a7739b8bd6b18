"""The planted causes that the doctor must name, and its examination of one of them, for the test and the benchmark."""

from __future__ import annotations

import asyncio
from pathlib import Path

from inflight.conformance.parity.opening import open_pair
from inflight.conformance.targets import EndpointTarget
from inflight.doctor.experiments import Examination, examine

CASES = [
    ("stale prefix cache", 1, ""),
    ("lost tensor", 2, "model.layers.1.self_attn.o_proj.weight"),
    ("update not applied", 2, "all tensors"),
    ("transformed again", 3, ""),
    ("started elsewhere", 3, "the initial load"),
    ("tied head", 4, "embed_tokens"),
    ("raw logprobs", 5, ""),
    ("rounded head", 6, "bfloat16"),
    ("misrouted", 7, "the router"),
    ("crowded", 8, "the batch"),
    ("quantized", 9, ""),
    ("stamped at admission", 10, ""),
]
"""What is planted, the number of its cause, and a part of where it is."""
MODELS = {"misrouted": "moe", "tied head": "tied"}
"""The models of faults that a dense, untied one cannot have."""


def examined(
    model: Path, cause: str, worker: str | None = None, *, tokens: int = 64, context: int | None = None
) -> Examination:
    """Examine an endpoint with a planted cause by completions of ``tokens`` tokens each, in a shorter ``context``."""
    options = {"cause": cause, "max_model_len": context}
    target = EndpointTarget(factory="tests.doctor.planted:start", options=options, model=model, worker=worker)

    async def run() -> Examination:
        opening = open_pair(target, {}, prompts=4, tokens=tokens, start_s=60, report=lambda _: None)
        async with opening as pair:
            return await examine(pair, lambda _: None)

    return asyncio.run(run())
