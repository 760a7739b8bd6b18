"""Faults at the edges: where completions end, at the end of the context, and with extreme temperatures or logits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import torch

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.sampler import sample
from inflight.wire import Completion, CompletionChunk, GenerateRequest, SamplingParams
from tests.conformance.mutants.mutant import Mutant
from tests.conformance.mutants.patches import Drawn, answering, drawing, replaces, sampling_with, without_last


def certain_end(which: Callable[[SamplingParams], object]) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Report logprob 0 of a token at which a completion stops."""

    def change(request: GenerateRequest, completion: Completion) -> dict[str, Any]:
        is_wrong = completion.finish_reason == "stop" and which(request.sampling)
        return {"logprobs": (*completion.logprobs[:-1], 0.0)} if is_wrong else {}

    return answering(change)


def stream_without_its_end(which: Callable[[SamplingParams], object]) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Drop the token at which a stream stops."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        stream = endpoint.generate_stream

        async def faulty(request: GenerateRequest) -> AsyncIterator[CompletionChunk]:
            async for chunk in stream(request):
                is_wrong = chunk.finish_reason == "stop" and which(request.sampling)
                yield chunk.model_copy(update={"token_ids": (), "logprobs": ()}) if is_wrong else chunk

        endpoint.generate_stream = faulty
        return endpoint

    return infect


@replaces("generate_stream")
async def stream_ends_with_length(
    endpoint: EmbeddedEndpoint, stream: Any, request: GenerateRequest
) -> AsyncIterator[CompletionChunk]:
    async for chunk in stream(request):
        yield chunk.model_copy(update={"finish_reason": chunk.finish_reason and "length"})


def searching(text_of: Callable[[Any, Any], str]) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Look for stop strings in another text: ``text_of`` receives a sequence and what decodes it."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        steps: Any = endpoint._engine.steps

        def faulty(sequence: Any) -> bool:
            text = text_of(sequence, steps._decode)
            return any(stop in text for stop in sequence.request.sampling.stop)

        steps._hit_stop_string = faulty
        return endpoint

    return infect


def with_positions(
    change: Callable[[torch.Tensor, int], torch.Tensor],
) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Change the positions of tokens; ``change`` also receives the length of the context."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        engine: Any = endpoint._engine
        longest = engine.limits.max_model_len

        def before(_: Any, args: Any, named: dict[str, Any]) -> Any:
            return args, {**named, "position_ids": change(named["position_ids"], longest)}

        engine.weights.model.base_model.register_forward_pre_hook(before, with_kwargs=True)
        return endpoint

    return infect


def tempering(change: Callable[[float], float]) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Draw at another temperature than the requested one."""
    return sampling_with(lambda s: {"temperature": change(s.temperature)})


def waiting_for_bytes(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Search for stop strings as if no token had more than one byte."""
    steps: Any = endpoint._engine.steps
    hit = steps._hit_stop_string

    def faulty(sequence: Any) -> bool:
        fewest = min(len(stop.encode()) for stop in sequence.request.sampling.stop)
        return len(sequence.token_ids) >= fewest and bool(hit(sequence))

    steps._hit_stop_string = faulty
    return endpoint


def filtered_when_greedy(logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Drawn:
    """Filter greedy rows too, and report the logprob of what is left."""
    sampled = [p if p.temperature else p.model_copy(update={"temperature": 1.0}) for p in params]
    _, filtered = sample(logits, sampled, [1e-9] * len(params))
    tokens, logprobs = sample(logits, params, uniforms)
    is_filtered = [not p.temperature and (p.top_k or p.top_p < 1 or p.min_p) for p in params]
    return tokens, [one if wrong else other for one, other, wrong in zip(filtered, logprobs, is_filtered, strict=True)]


def with_logits(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Change the logits before they are divided by a temperature."""
    return drawing(lambda logits, params, uniforms: sample(change(logits), params, uniforms))


def clamped_once_divided(logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Drawn:
    temperatures = logits.new_tensor([p.temperature or 1.0 for p in params])[:, None]
    return sample((logits / temperatures).clamp(-80, 80) * temperatures, params, uniforms)


def attention_capped(largest: float) -> Callable[[Any], EmbeddedEndpoint]:
    """Clamp the elements of queries, which bounds attention scores as a cap would."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        engine: Any = endpoint._engine

        def after(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
            return output.clamp(-largest, largest)

        for name, module in engine.weights.model.named_modules():
            if name.endswith("q_norm"):
                module.register_forward_hook(after)
        return endpoint

    return infect


@replaces("generate_stream")
async def aborted_stream_without_an_end(
    endpoint: EmbeddedEndpoint, stream: Any, request: GenerateRequest
) -> AsyncIterator[CompletionChunk]:
    """Report no finish reason of a stream that was aborted."""
    async for chunk in stream(request):
        if chunk.finish_reason != "abort":
            yield chunk


@replaces("chat_completion_stream")
async def chat_stream_drops_its_end(endpoint: EmbeddedEndpoint, stream: Any, request: Any) -> AsyncIterator[Any]:
    """Leave out the last text of a chat stream that stops."""
    async for event in stream(request):
        choices = [
            it.model_copy(update={"delta": it.delta.model_copy(update={"content": ""})})
            if it.finish_reason == "stop"
            else it
            for it in event.choices
        ]
        yield event.model_copy(update={"choices": tuple(choices)})


@replaces("chat_completion_stream")
async def chat_stream_ends_with_a_character(
    endpoint: EmbeddedEndpoint, stream: Any, request: Any
) -> AsyncIterator[Any]:
    """Leave out a character that the last tokens of a chat stream do not complete."""
    async for event in stream(request):
        choices = [
            it.model_copy(update={"delta": it.delta.model_copy(update={"content": it.delta.content.rstrip("\ufffd")})})
            if it.finish_reason
            else it
            for it in event.choices
        ]
        yield event.model_copy(update={"choices": tuple(choices)})


def late_completions_shifted(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Report the logprobs of a request's last completion one token late."""

    def change(_: GenerateRequest, completion: Completion) -> dict[str, Any]:
        return {"logprobs": (*completion.logprobs[1:], -1.0)} if completion.index > 2 else {}

    return answering(change)(endpoint)


def nothing_kept(logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Drawn:
    """Draw from the whole distribution where a nucleus is so small that it holds no token."""
    return sample(logits, [p.model_copy(update={"top_p": 1.0}) if p.top_p < 0.01 else p for p in params], uniforms)


def one_is_none(logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Drawn:
    """Take a top-k of 1 for no filter."""
    return sample(logits, [p.model_copy(update={"top_k": 0}) if p.top_k == 1 else p for p in params], uniforms)


def _plain_end(sampling: SamplingParams) -> bool:
    return not sampling.stop_token_ids and not sampling.stop


def sixty_four_at_most(logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Drawn:
    bounded = [p.model_copy(update={"top_k": min(p.top_k, 64)}) for p in params]
    kept = [one if p.top_k < logits.shape[-1] else p for one, p in zip(bounded, params, strict=True)]
    return sample(logits, kept, uniforms)


def stops_across_parts(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Search the text of a continuation together with that of the parts before it."""
    steps: Any = endpoint._engine.steps

    def faulty(sequence: Any) -> bool:
        request = sequence.request
        before = request.prompt_token_ids[len(request.prompt_token_ids) - request.num_continued :]
        text = steps._decode([*before, *sequence.token_ids][-16:])
        return any(stop in text for stop in request.sampling.stop)

    steps._hit_stop_string = faulty
    return endpoint


def searched_by_characters(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Search only as many of the latest tokens as the longest stop string has characters."""
    steps: Any = endpoint._engine.steps

    def faulty(sequence: Any) -> bool:
        stops = sequence.request.sampling.stop
        text = steps._decode(sequence.token_ids[-max(map(len, stops)) :])
        return any(stop in text for stop in stops)

    steps._hit_stop_string = faulty
    return endpoint


def prompts_within_a_character_searched(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Search the text of the prompt too, as soon as sampled tokens complete the character at its end."""
    steps: Any = endpoint._engine.steps

    def faulty(sequence: Any) -> bool:
        request = sequence.request
        prompt, ids = list(request.prompt_token_ids)[-32:], list(sequence.token_ids)
        if steps._decode(prompt).endswith("\ufffd") and not steps._decode([*prompt, *ids]).endswith("\ufffd"):
            ids = [*prompt, *ids]
        return any(stop in steps._decode(ids) for stop in request.sampling.stop)

    steps._hit_stop_string = faulty
    return endpoint


def searched_without_outer_space(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Strip the white space around the text before searching it."""
    steps: Any = endpoint._engine.steps

    def faulty(sequence: Any) -> bool:
        text = steps._decode(sequence.token_ids[-16:]).strip()
        return any(stop in text for stop in sequence.request.sampling.stop)

    steps._hit_stop_string = faulty
    return endpoint


def only_the_first_end(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    steps: Any = endpoint._engine.steps
    steps._eos_token_ids = frozenset(sorted(steps._eos_token_ids)[-1:])  # the kit's models list the largest id first
    return endpoint


MUTANTS = (
    Mutant(
        "only the first end of a sequence",
        "E-21",
        "Of several end-of-sequence tokens, only the first ends a completion.",
        only_the_first_end,
    ),
    Mutant("end of sequence certain", "E-21", "An end-of-sequence token has logprob 0.", certain_end(_plain_end)),
    Mutant("stop token certain", "E-19", "A stop token has logprob 0.", certain_end(lambda s: s.stop_token_ids)),
    Mutant(
        "stop string certain", "E-20", "The last token of a stop string has logprob 0.", certain_end(lambda s: s.stop)
    ),
    Mutant(
        "stop token not streamed",
        "E-24",
        "A stream ends without its stop token.",
        stream_without_its_end(lambda s: s.stop_token_ids),
    ),
    Mutant(
        "stop string not streamed",
        "E-24",
        "A stream ends without the last token of its stop string.",
        stream_without_its_end(lambda s: s.stop),
    ),
    Mutant(
        "end of sequence not streamed",
        "E-24",
        "A stream ends without its end-of-sequence token.",
        stream_without_its_end(_plain_end),
    ),
    Mutant(
        "streams end with length", "E-24", "Every stream reports the finish reason length.", stream_ends_with_length
    ),
    Mutant(
        "stop strings found in prompts",
        "E-20",
        "The text of the prompt is also searched for stop strings.",
        searching(lambda sequence, decode: decode(sequence.all_ids())),
    ),
    Mutant(
        "stop strings begin in prompts",
        "E-20",
        "A stop string is found even if it begins in the prompt's last token.",
        searching(lambda s, decode: decode([*s.request.prompt_token_ids[-1:], *s.token_ids])),
    ),
    Mutant(
        "stop strings of one token only",
        "E-20",
        "A stop string is found only within the text of a single token.",
        searching(lambda sequence, decode: decode(sequence.token_ids[-1:])),
    ),
    Mutant(
        "stop tokens of prompts",
        "E-19",
        "A stop token that the prompt contains ends the completion at once.",
        answering(
            lambda r, c: (
                {**without_last(c, len(c.token_ids) - 1), "finish_reason": "stop"}
                if set(r.sampling.stop_token_ids) & set(r.prompt_token_ids)
                else {}
            )
        ),
    ),
    Mutant(
        "last stop token ignored",
        "E-19",
        "All stop tokens but the first are ignored.",
        sampling_with(lambda s: {"stop_token_ids": s.stop_token_ids[:1]}),
    ),
    Mutant(
        "ignore_eos ignores stop tokens",
        "E-21",
        "With `ignore_eos`, an end-of-sequence token in `stop_token_ids` is ignored.",
        sampling_with(
            lambda s: {"stop_token_ids": tuple(i for i in s.stop_token_ids if i != 257)} if s.ignore_eos else {}
        ),
    ),
    Mutant(
        "aborted streams without an end",
        "E-67",
        "A stream that is aborted ends without a finish reason.",
        aborted_stream_without_an_end,
    ),
    Mutant(
        "chat streams drop their end",
        "E-29",
        "The text of the token at which a chat stops is not streamed.",
        chat_stream_drops_its_end,
    ),
    Mutant(
        "chats to a whole character",
        "E-29",
        "A chat stream leaves out the character that its last tokens do not complete.",
        chat_stream_ends_with_a_character,
    ),
    Mutant(
        "late completions shifted",
        "E-87",
        "Completions beyond the third of a request have the logprobs of the next token.",
        late_completions_shifted,
    ),
    Mutant("small nuclei ignored", "E-13", "A top-p below 0.01 counts as none.", drawing(nothing_kept)),
    Mutant("a top-k of one ignored", "E-14", "A top-k of 1 counts as none.", drawing(one_is_none)),
    Mutant(
        "positions end early",
        "E-03",
        "The last eight positions of the context share one position.",
        with_positions(lambda positions, longest: positions.clamp(max=longest - 8)),
    ),
    Mutant(
        "positions in 16 bits",
        "E-03",
        "Positions beyond 1024 are rounded to even numbers.",
        with_positions(lambda positions, _: torch.where(positions > 1024, positions // 2 * 2, positions)),
    ),
    Mutant(
        "filters when greedy",
        "E-16",
        "At temperature 0, logprobs are those of the filtered distribution.",
        drawing(filtered_when_greedy),
    ),
    Mutant(
        "temperatures bounded below",
        "E-12",
        "Temperatures below 0.1 count as 0.1.",
        tempering(lambda t: t and max(t, 0.1)),
    ),
    Mutant("temperatures bounded above", "E-12", "Temperatures above 2 count as 2.", tempering(lambda t: min(t, 2.0))),
    Mutant(
        "low temperatures greedy",
        "E-12",
        "Temperatures below 0.1 count as 0.",
        tempering(lambda t: 0.0 if t < 0.1 else t),
    ),
    Mutant(
        "lowest temperatures greedy",
        "E-12",
        "Temperatures below 0.02 count as 0.",
        tempering(lambda t: 0.0 if t < 0.02 else t),
    ),
    Mutant(
        "stop strings after as many tokens as bytes",
        "E-20",
        "Stop strings are not searched for until a completion has as many tokens as the shortest one has bytes.",
        waiting_for_bytes,
    ),
    Mutant("logits clamped", "U-74", "Logits are clamped at 50.", with_logits(lambda logits: logits.clamp(-50, 50))),
    Mutant(
        "logits capped",
        "U-74",
        "Logits are soft-capped at 50.",
        with_logits(lambda logits: 50 * (logits / 50).tanh()),
    ),
    Mutant(
        "logits clamped at 200",
        "U-74",
        "Logits are clamped at 200.",
        with_logits(lambda logits: logits.clamp(-200, 200)),
    ),
    Mutant(
        "divided logits clamped",
        "U-74",
        "Logits are clamped at 80 after they are divided by the temperature.",
        drawing(clamped_once_divided),
    ),
    Mutant(
        "small logits left out",
        "U-74",
        "Logits more than 60 below the largest are treated as 60 below it.",
        with_logits(lambda logits: logits.maximum(logits.amax(-1, keepdim=True) - 60)),
    ),
    Mutant(
        "attention capped", "U-74", "Queries are clamped at 20, which bounds attention scores.", attention_capped(20.0)
    ),
    Mutant(
        "attention capped higher",
        "U-74",
        "Queries are clamped at 80, which bounds attention scores.",
        attention_capped(80.0),
    ),
    Mutant(
        "stop strings across parts",
        "E-20",
        "A stop string that begins in an earlier part ends the continuation.",
        stops_across_parts,
    ),
    Mutant(
        "stop strings counted in characters",
        "E-20",
        "Only as many of the latest tokens are searched as the longest stop string has characters.",
        searched_by_characters,
    ),
    Mutant(
        "prompts within a character searched",
        "E-20",
        "Stop strings are also searched in a prompt that ends within a character.",
        prompts_within_a_character_searched,
    ),
    Mutant(
        "stop strings without outer space",
        "E-20",
        "Leading and trailing white space is removed from the text before it is searched for stop strings.",
        searched_without_outer_space,
    ),
    Mutant(
        "windows of stop strings in characters",
        "E-20",
        "Only the latest tokens are searched, four more than the longest stop string has characters.",
        searching(lambda s, decode: decode(s.token_ids[-(max(map(len, s.request.sampling.stop)) + 4) :])),
    ),
    Mutant(
        "window of the first stop string",
        "E-20",
        "Only as many of the latest tokens are searched as the first stop string can have, and four more.",
        searching(lambda s, decode: decode(s.token_ids[-(len(s.request.sampling.stop[0].encode()) + 4) :])),
    ),
    Mutant(
        "four stop strings",
        "E-20",
        "Stop strings after the fourth are ignored.",
        sampling_with(lambda s: {"stop": s.stop[:4]}),
    ),
    Mutant(
        "sixteen stop tokens",
        "E-19",
        "Stop tokens after the sixteenth are ignored.",
        sampling_with(lambda s: {"stop_token_ids": s.stop_token_ids[:16]}),
    ),
    Mutant(
        "a top-k of at most 64",
        "E-14",
        "A top-k between 64 and the size of the vocabulary is treated as 64.",
        drawing(sixty_four_at_most),
    ),
)
