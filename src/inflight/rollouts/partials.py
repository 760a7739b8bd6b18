"""Partial rollouts: an aborted completion continues on any endpoint, and its parts are joined.

Each part keeps its logprobs and spans. A continuation computes the keys and values of the prompt and of the earlier
tokens under the weights that its endpoint serves. A stop string that begins in one part and ends in the next is not
found.
"""

from __future__ import annotations

import hashlib

from inflight.wire import Completion, GenerateRequest, VersionSpan, longest_record


def continuation(request: GenerateRequest, partial: Completion, request_id: str) -> GenerateRequest:
    """Return the request for the rest of one aborted completion of ``request``.

    It has a new seed, because the same seed would repeat the random numbers of the first part. Raises ``ValueError`` if
    the completion was not aborted, or already has ``max_tokens`` tokens.
    """
    which = f"completion {partial.index} of {request.request_id!r}"
    sampling, num_tokens = request.sampling, len(partial.token_ids)
    if partial.finish_reason != "abort":
        raise ValueError(f"{which} cannot be continued: it ended with {partial.finish_reason!r}, not 'abort'")
    left = None if sampling.max_tokens is None else sampling.max_tokens - num_tokens
    if left is not None and left < 1:
        raise ValueError(
            f"{which} was aborted after all of its {sampling.max_tokens} tokens, so there is nothing to continue"
        )
    seed = None if sampling.seed is None else _next_seed(sampling.seed, partial.index, num_tokens)
    return request.model_copy(
        update={
            "request_id": request_id,
            "prompt_token_ids": (*request.prompt_token_ids, *partial.token_ids),
            "num_continued": request.num_continued + num_tokens,
            "sampling": sampling.model_copy(update={"n": 1, "max_tokens": left, "seed": seed}),
        }
    )


def joined(first: Completion, second: Completion) -> Completion:
    """Return a completion and its continuation as one completion, with draft counts if both have them.

    Tokens that the continuation recomputed keep the experts that first computed them.
    """
    num_tokens = len(first.token_ids)
    spans, later = list(first.version_spans), [_shifted(span, num_tokens) for span in second.version_spans]
    if spans and later and spans[-1].version == later[0].version:
        later[0] = later[0].model_copy(update={"start": spans.pop().start})
    return Completion(
        index=first.index,
        token_ids=(*first.token_ids, *second.token_ids),
        logprobs=(*first.logprobs, *second.logprobs),
        version_spans=(*spans, *later),
        finish_reason=second.finish_reason,
        draft_counts=None
        if first.draft_counts is None or second.draft_counts is None
        else first.draft_counts + second.draft_counts,
        routed_experts=longest_record(first.routed_experts, second.routed_experts),
    )


def _shifted(span: VersionSpan, num_tokens: int) -> VersionSpan:
    return VersionSpan(version=span.version, start=span.start + num_tokens, end=span.end + num_tokens)


def _next_seed(seed: int, index: int, num_tokens: int) -> int:
    """Return a different seed for each completion of a request and each position at which it was cut."""
    digest = hashlib.blake2b(f"{seed}:{index}:{num_tokens}".encode(), digest_size=8).digest()
    return int.from_bytes(digest)
