"""Steps of the embedded engine. Each step runs a forward pass, draws tokens and delivers them.

If a step raises an error, it is repeated for each half of its sequences, until the sequence that causes the error runs
alone; the request of that sequence is then ended. A step can be repeated because it changes nothing before its tokens
are drawn.

Shape suffixes: B rows of logits, V vocabulary, T tokens, L layers, K chosen experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import torch

from inflight.engines.embedded.counters import EngineCounters
from inflight.engines.embedded.forwards import Forwards, PackedPrompt
from inflight.engines.embedded.sampler import sample
from inflight.engines.embedded.sampling_pauses import SamplingPauses
from inflight.engines.embedded.scheduler import SequenceScheduler
from inflight.engines.embedded.sequences import EngineRequest, Sequence
from inflight.engines.embedded.slots import Slot
from inflight.engines.embedded.speculation import DrawnTokens, Speculation
from inflight.errors import EndpointError, InflightError, InvalidRequestError
from inflight.model.routing import RoutingRecorder
from inflight.wire import FinishReason


class StepRunner:
    """Samples tokens for the sequences of a scheduler, with the weights of ``version``. Engine's thread only.

    ``eos_token_ids`` end a completion, and ``decode`` turns token ids into text, for stop strings.
    """

    def __init__(
        self,
        scheduler: SequenceScheduler,
        pauses: SamplingPauses,
        forwards: Forwards,
        speculation: Speculation,
        counters: EngineCounters,
        *,
        recorder: RoutingRecorder | None,
        eos_token_ids: Iterable[int],
        decode: Callable[[list[int]], str] | None,
    ) -> None:
        self.version = 0
        self.recorder = recorder
        self._scheduler = scheduler
        self._pauses = pauses
        self._store = scheduler.store
        self._forwards = forwards
        self._speculation = speculation
        self._counters = counters
        self._eos_token_ids = frozenset(eos_token_ids)
        self._decode = decode

    def step(self) -> None:
        """For every sequence that is running or can start, sample the accepted tokens of its draft and one more token.

        Requests that fail are ended.
        """
        failed: list[tuple[EngineRequest, Exception]] = []
        running = self._scheduler.running
        wanted = {slot: 1 + self._speculation.propose(sequence) for slot, sequence in running.items()}
        self._store.expect(wanted.items())
        for slot, sequence in list(running.items()):
            if sequence.slot is slot:  # not if another sequence of its request has failed
                try:
                    self._store.reserve(slot, wanted[slot])
                except Exception as error:  # such as insufficient memory
                    failed.append((self._scheduler.remove(sequence.request), error))
        new = self._scheduler.start_waiting(failed)
        self._advance([[sequence] for sequence in running.values()] + new, failed)
        if not failed:
            return
        broken = self._engine_error()
        for request, why in failed:
            request.on_failed(_failure_of(request, broken or why, is_engine=broken is not None))
        if broken is not None:
            raise broken from failed[0][1]

    def _advance(self, groups: list[list[Sequence]], failed: list[tuple[EngineRequest, Exception]]) -> None:
        """Sample for each sequence of these groups. Requests that fail even alone are moved to ``failed``.

        A group is one running sequence, or new sequences with the same token ids.
        """
        groups = [opened for group in groups if (opened := [s for s in group if s.slot is not None])]
        if not groups:
            return
        try:
            drawn = self._forward(groups)
        except Exception as error:  # models, filters and memory may raise anything
            if len(groups) == 1:
                (group,) = groups
                groups = [[s for s in group if s.request is it] for it in {s.request: None for s in group}]
            if len(groups) == 1:
                failed.append((self._scheduler.remove(groups[0][0].request), error))
                return
            self._advance(groups[: len(groups) // 2], failed)
            self._advance(groups[len(groups) // 2 :], failed)
            return
        for it in drawn:
            if it.sequence.slot is None:
                continue  # another sequence of its request has failed
            try:
                reason = self._append(it)
            except Exception as error:  # a tokenizer that cannot decode these tokens
                failed.append((self._scheduler.remove(it.sequence.request), error))
                continue
            if reason is not None:
                self._scheduler.finish(it.sequence, reason)
            elif it.sequence.request.on_token is not None:
                it.sequence.request.on_token(it.sequence)

    def _forward(self, groups: list[list[Sequence]]) -> list[DrawnTokens]:
        """Run one forward pass, which stores keys and values, and return the tokens that each sequence receives."""
        running = {s.slot: s for (s, *_) in groups if s.slot is not None and s.slot in self._scheduler.running}
        new = [group for group in groups if group[0].slot not in self._scheduler.running]
        prompts = [
            PackedPrompt(
                leader.slot, leader.all_ids(), len(group), leader.request.image_rows(), leader.request.image_tensors
            )
            for group in new
            if (leader := group[0]).slot is not None
        ]
        decoded = {slot: (s.token_ids[-1], *s.draft) for slot, s in running.items()}
        recorder = self.recorder if any(s.request.routed_experts for group in groups for s in group) else None
        with contextlib.nullcontext() if recorder is None else recorder.recording():
            slots, logits_BV = self._forwards.logits(decoded, prompts)
        drawing = [running[slot] for slot in slots] + [sequence for group in new for sequence in group]
        drawn = self._draw(drawing, logits_BV)
        if recorder is not None:
            _note_experts(recorder, slots, [len(decoded[slot]) for slot in slots], drawn, new)
        for slot, it in zip(slots, drawn, strict=False):
            slot.length += len(it.token_ids)
        self._run_new(new, prompts)
        self._counters.num_steps += 1
        self._counters.num_prompt_tokens += sum(len(prompt.token_ids) for prompt in prompts)
        self._pauses.record_first_token()
        return drawn

    def _draw(self, drawing: list[Sequence], logits_BV: torch.Tensor) -> list[DrawnTokens]:
        rows = [sequence for sequence in drawing for _ in range(1 + len(sequence.draft))]
        uniforms = [number for sequence in drawing for number in sequence.draw(1 + len(sequence.draft))]
        tokens = sample(logits_BV, [s.request.sampling for s in rows], uniforms)
        return self._speculation.verify(drawing, *tokens)

    def _run_new(self, new: list[list[Sequence]], prompts: list[PackedPrompt]) -> None:
        """Start the sequences whose prompts have been computed.

        All but the first of a group receive copies of its keys and values.
        """
        for prompt in prompts:
            prompt.slot.length = len(prompt.token_ids)
        for leader, *followers in new:
            assert leader.slot is not None
            self._scheduler.running[leader.slot] = leader
            for follower in followers:
                assert follower.slot is not None
                self._store.copy(leader.slot, follower.slot)
                self._scheduler.running[follower.slot] = follower

    def _engine_error(self) -> Exception | None:
        """Run a prompt of one token, and return the error that it raises.

        None means that the requests, not the engine, caused the failure.
        """
        try:
            slot = self._store.open(1, 1)
            try:
                _, logits_BV = self._forwards.logits({}, [PackedPrompt(slot, [0])])
                logits_BV.cpu()  # a GPU reports its errors only now
            finally:
                self._store.close(slot)
        except Exception as error:
            return error
        return None

    def _append(self, drawn: DrawnTokens) -> FinishReason | None:
        """Add tokens to a sequence until one ends it; return why it ends, or None if it continues."""
        sequence = drawn.sequence
        if not sequence.spans or sequence.spans[-1][0] != self.version:
            sequence.spans.append((self.version, len(sequence.token_ids)))
        for i, (token, logprob) in enumerate(zip(drawn.token_ids, drawn.logprobs, strict=True), 1):
            sequence.append(token, logprob)
            self._counters.num_tokens += 1
            if (reason := self._end_of(sequence)) is not None:
                sequence.num_accepted -= max(0, len(drawn.token_ids) - 1 - i)  # accepted, but not in the completion
                return reason
        return None

    def _end_of(self, sequence: Sequence) -> FinishReason | None:
        """Return why a sequence ends with its last token, or None if it continues."""
        request, token = sequence.request, sequence.token_ids[-1]
        params = request.sampling
        if (
            token in params.stop_token_ids
            or (token in self._eos_token_ids and not params.ignore_eos)
            or (params.stop and self._hit_stop_string(sequence))
        ):
            return "stop"
        return "length" if len(sequence.token_ids) >= request.max_tokens else None

    def _hit_stop_string(self, sequence: Sequence) -> bool:
        assert self._decode is not None
        longest = max(len(stop.encode()) for stop in sequence.request.sampling.stop)
        # Special tokens have no text, so more tokens are decoded than the longest stop string has bytes.
        tail = self._decode(sequence.token_ids[-(2 * longest + 16) :])
        return any(stop in tail for stop in sequence.request.sampling.stop)


def _note_experts(
    recorder: RoutingRecorder,
    slots: list[Slot],
    num_decoded: list[int],
    drawn: list[DrawnTokens],
    new: list[list[Sequence]],
) -> None:
    """Store the experts of tokens: ``num_decoded`` tokens of each running sequence, and all tokens of new sequences."""
    experts_TLK = recorder.take()
    for slot, num, it in zip(slots, num_decoded, drawn, strict=False):
        it.sequence.note_routed(slot.length, experts_TLK[: len(it.token_ids)].copy())
        experts_TLK = experts_TLK[num:]
    for group in new:
        num = len(group[0].all_ids())
        for sequence in group:
            sequence.note_routed(0, experts_TLK[:num])
        experts_TLK = experts_TLK[num:]


def _failure_of(request: EngineRequest, error: Exception, *, is_engine: bool) -> InflightError:
    what = f"{type(error).__name__}: {error}"
    if is_engine:
        return EndpointError(f"the engine failed ({what}); restart the server")
    num_tokens = sum(len(sequence.token_ids) for sequence in request.sequences)
    return InvalidRequestError(
        f"request {request.request_id!r} was ended after {num_tokens} tokens because it fails in the engine even "
        f"when it runs alone ({what}); other requests continue"
    )
