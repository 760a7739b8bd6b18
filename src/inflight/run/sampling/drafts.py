"""Sends finished groups to endpoints, which draft later completions of the same prompts from them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection

from inflight.contracts import DraftingEndpoint, InferenceEndpoint
from inflight.errors import InflightError
from inflight.rollouts.drafts import split_history
from inflight.types import Group
from inflight.wire import DraftHistory, PromptHistory

_MAX_WAITING = 1024
"""Number of groups that may wait to be sent; if there are more, the oldest is dropped."""
_MAX_TOKENS = 1 << 20
"""Maximum number of tokens in one message, unless a single group has more."""


class FinishedGroups:
    """Collects finished groups, and sends them while `send` runs."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, ...], Group] = {}
        self._arrived = asyncio.Event()
        self._drafting: dict[InferenceEndpoint, bool] = {}

    def finished(self, group: Group) -> None:
        """Queue a group to be sent, replacing an earlier group of the same prompt that is still waiting.

        Episodes are left out, because later turns have other prompts.
        """
        if any(rollout.turns for rollout in group.rollouts):
            return
        prompt = tuple(group.rollouts[0].prompt_token_ids)
        self._waiting[prompt] = group
        if len(self._waiting) > _MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]
        self._arrived.set()

    async def send(self, endpoints: Collection[InferenceEndpoint]) -> None:
        """Send groups as they finish to those of ``endpoints`` that support drafts, until cancelled.

        ``endpoints`` may change while this runs. An endpoint that fails misses these groups, and drafts less.
        """
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            groups, self._waiting = self._waiting, {}
            asked = await asyncio.gather(*(self._drafts(endpoint) for endpoint in tuple(endpoints)))
            if drafting := [endpoint for endpoint in asked if endpoint is not None]:
                histories = (_history(prompt, group) for prompt, group in groups.items())
                messages = list(split_history(histories, _MAX_TOKENS))
                await asyncio.gather(*(self._record(endpoint, messages) for endpoint in drafting))

    async def _drafts(self, endpoint: InferenceEndpoint) -> DraftingEndpoint | None:
        """Return the endpoint if it supports drafts; None if it does not support them or does not answer."""
        with contextlib.suppress(InflightError):  # requests to the endpoint indicate whether it can still be used
            if endpoint not in self._drafting:
                self._drafting[endpoint] = (await endpoint.capabilities()).drafts
            if self._drafting[endpoint] and isinstance(endpoint, DraftingEndpoint):
                return endpoint
        return None

    async def _record(self, endpoint: DraftingEndpoint, messages: list[DraftHistory]) -> None:
        with contextlib.suppress(InflightError):
            for history in messages:
                await endpoint.record_history(history)


def _history(prompt: tuple[int, ...], group: Group) -> PromptHistory:
    return PromptHistory(
        prompt_token_ids=prompt,
        completions=tuple(tuple(rollout.completion_token_ids) for rollout in group.rollouts),
        rewards=tuple(rollout.reward for rollout in group.rollouts),
    )
