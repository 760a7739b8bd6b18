"""The forward passes of one engine step: one token for each running sequence, and whole prompts.

Shape suffixes: B rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inflight.engines.embedded.decoding import Decoder
from inflight.engines.embedded.slot_attention import StepPlan
from inflight.engines.embedded.slots import Slot, SlotStore
from inflight.model.vision import embedded


@dataclass(frozen=True, slots=True)
class PackedPrompt:
    """A prompt whose keys and values are computed and stored in a slot."""

    slot: Slot
    token_ids: Sequence[int]
    num_rows: int = 1
    """Number of identical rows of logits to return for the last token: one for each sequence that begins with this
    prompt.
    """
    image_rows: Sequence[int] = ()
    """Indices of the tokens that are placeholders for images."""
    image_tensors: Mapping[str, torch.Tensor] | None = None
    """The vision tower's inputs for the images; None without images."""


class Forwards:
    """Runs a model over the slots of a store. With a decoder, prompts are computed in a separate forward pass."""

    def __init__(self, model: Any, store: SlotStore, device: torch.device, decoder: Decoder | None) -> None:
        self._model = model
        self._head = model.get_output_embeddings()
        self._store = store
        self._device = device
        self._decoder = decoder

    def logits(
        self, running: Mapping[Slot, Sequence[int]], prompts: Sequence[PackedPrompt]
    ) -> tuple[list[Slot], torch.Tensor]:
        """Store the keys and values of each slot's next tokens and of prompts. Return slots and logits [B, V].

        The next tokens are the last sampled token and, without a decoder, drafts after it. There is one row of logits
        for each of them, in the order of the returned slots, followed by the rows of the prompts. The lengths of the
        slots do not change.
        """
        if self._decoder is None or not running:
            return self._packed(running, prompts)
        decoded_BV = self._decoder.logits({slot: token_ids[0] for slot, token_ids in running.items()})
        if not prompts:
            return list(running), decoded_BV
        _, prefilled_BV = self._packed({}, prompts)
        return list(running), torch.cat([decoded_BV, prefilled_BV])

    def _packed(
        self, running: Mapping[Slot, Sequence[int]], prompts: Sequence[PackedPrompt]
    ) -> tuple[list[Slot], torch.Tensor]:
        """Compute running sequences and prompts in one packed row."""
        ahead = {slot: len(token_ids) - 1 for slot, token_ids in running.items() if len(token_ids) > 1}
        lengths = [len(it.token_ids) for it in prompts]
        plan = StepPlan(self._store, [it.slot for it in prompts], lengths, self._device, running, ahead)
        packed = [token for slot in plan.decoding_slots for token in running[slot]]
        keep = list(range(len(packed)))
        for prompt in prompts:
            packed += prompt.token_ids
            keep += [len(packed) - 1] * prompt.num_rows
        hidden = self._model.base_model(
            **self._inputs(packed, prompts),
            position_ids=torch.tensor([plan.positions()], device=self._device),
            use_cache=False,
            step_plan=plan,
        ).last_hidden_state[0]
        if keep != list(range(len(packed))):
            hidden = hidden[torch.tensor(keep, device=self._device)]
        return plan.decoding_slots, self._head(hidden)

    def _inputs(self, packed: Sequence[int], prompts: Sequence[PackedPrompt]) -> dict[str, torch.Tensor]:
        """Return the ids of packed tokens, or their embeddings if there are images. The prompts' tokens come last."""
        token_ids_T = torch.tensor(packed, device=self._device)
        with_images = [it.image_tensors for it in prompts if it.image_tensors is not None]
        if not with_images:
            return {"input_ids": token_ids_T[None]}
        rows, start = [], len(packed) - sum(len(it.token_ids) for it in prompts)
        for prompt in prompts:
            rows += [start + row for row in prompt.image_rows]
            start += len(prompt.token_ids)
        tensors = {name: torch.cat([of[name] for of in with_images]) for name in with_images[0]}
        rows_M = torch.tensor(rows, device=self._device)
        return {"inputs_embeds": embedded(self._model, token_ids_T, rows_M, tensors)[None]}
