"""Episodes as OpenEnv's `TrainingTrace`, schema 1, with the version of every sampled token.

Source of the schema: ``openenv/core/harness/training.py`` of OpenEnv 0.10. It allows additional fields only in a turn's
``metadata``, which therefore contains the versions. OpenEnv itself is not needed.
"""

from __future__ import annotations

from typing import Any

from inflight.environments.recording import PlayedEpisode

SCHEMA_VERSION = 1


def training_trace(played: PlayedEpisode, session_id: str) -> dict[str, Any]:
    """Return the calls of an episode as the JSON of a `TrainingTrace`, with one turn for each call, in order.

    ``metadata`` has ``version_spans`` (``version``, ``start`` and ``end`` over the turn's completion), the ``role``,
    the ``reward`` of that role, the ``turn_reward`` and the ``finish_reason``. Prompts are context, and every sampled
    token is trained on. Calls that sampled nothing are omitted. Raises ``ValueError`` for an episode that failed.
    """
    if played.failure is not None:
        raise ValueError(f"a failed episode has no trace to train on: {played.failure}")
    turns = []
    for index, call in enumerate(played.calls):
        completion = call.completion
        if not completion.num_tokens:
            continue
        turns.append(
            {
                "node_id": f"{session_id}-{index}",
                "prompt_token_ids": list(call.prompt_token_ids),
                "completion_token_ids": list(completion.token_ids),
                "per_token_logps": list(completion.logprobs),
                "loss_mask": [0] * len(call.prompt_token_ids) + [1] * completion.num_tokens,
                "request": {},
                "response": {},
                "metadata": {
                    "index": index,
                    "harness_session_id": session_id,
                    "role": call.role,
                    "reward": played.role_rewards.get(call.role, played.reward),
                    "turn_reward": call.reward,
                    "finish_reason": completion.finish_reason,
                    "version_spans": [span.model_dump() for span in completion.version_spans],
                },
            }
        )
    return {"schema_version": SCHEMA_VERSION, "turns": turns}
