"""Conversion of the contract's requests to vLLM's format, and of vLLM's answers to the contract's."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from inflight.base.requirements import require
from inflight.engines.requests import SentRequest, check_fit, protocol_errors, unsampled_completion
from inflight.engines.version_labels import spans_of
from inflight.errors import InvalidRequestError, NonFiniteError, UnsupportedError
from inflight.wire import (
    Capabilities,
    Completion,
    DraftCounts,
    GenerateRequest,
    GenerateResponse,
    Needs,
    PromptImage,
    SamplingParams,
    ScoreRequest,
    ScoreResponse,
    VersionSpan,
)
from inflight_vllm.drafting import CONTINUED

GENERATE = "/inference/v1/generate"
_PREFIX = "generate-tokens-"
"""The prefix that vLLM adds to the ids of requests on this route."""
_FLOOR = -9999.0
"""The value that vLLM returns instead of a logprob that is NaN or minus infinity."""
REFUSED_FOR_NOW = "ServiceUnavailableError"
"""The error type with which vLLM refuses a request that may be sent again."""


def check_request(request: GenerateRequest, can: Capabilities, *, speculates: bool = False) -> None:
    """Raise `InvalidRequestError` if the request does not fit in the model's context or vocabulary.

    Raises `UnsupportedError` as `check_sampling` does, and for anything else that the server does not support.
    """
    check_fit(request, max_model_len=can.max_model_len, vocab_size=can.vocab_size)
    check_sampling(request.sampling, can, speculates=speculates)
    require(can, Needs.of_request(request), "this endpoint")


def check_sampling(sampling: SamplingParams, can: Capabilities, *, speculates: bool) -> None:
    """Raise `UnsupportedError` if the server cannot sample as the contract requires.

    It cannot with combined filters that vLLM applies in a different order, with seeds that the server does not honour,
    or with seeds or min-p if the server ``speculates``, that is, verifies drafts.
    """
    if speculates and sampling.min_p > 0:
        raise UnsupportedError(
            f"min_p {sampling.min_p:g}: vLLM ignores min-p while it verifies drafts; start the server without drafts"
        )
    if speculates and sampling.seed is not None:
        raise UnsupportedError(
            f"seed {sampling.seed}: vLLM draws different tokens for a seed where it verifies a draft, so they "
            "would depend on the drafts; start the server without drafts"
        )
    if sampling.seed is not None and not can.seeds:
        raise UnsupportedError(
            f"seed {sampling.seed}: a seed crashes this vLLM server if a prompt does not fit into one step; on a CPU "
            "start it with --no-enable-chunked-prefill"
        )
    if sampling.min_p > 0 and sampling.top_p < 1:
        raise UnsupportedError(
            f"min_p {sampling.min_p:g} together with top_p {sampling.top_p:g}: vLLM applies min-p first, the contract "
            "applies it last, and the kept sets differ. Set only one of them"
        )


def bodies_of(request: GenerateRequest, can: Capabilities, asked: Mapping[int, SentRequest]) -> list[dict[str, Any]]:
    """Return the bodies of ``POST /inference/v1/generate`` for the completions with these indices.

    There are several bodies if vLLM cannot sample so many completions at once, or if it counts drafts, which it does
    only for requests with a single completion.
    """
    largest_n = 1 if can.draft_counts else can.max_concurrent_sequences
    bodies = []
    for _, group in itertools.groupby(asked, lambda index: asked[index].cache_key):
        indices = list(group)
        for at in range(0, len(indices), largest_n):
            start = indices[at]
            bodies.append(_body(request, can, asked[start], start, len(indices[at : at + largest_n])))
    return bodies


def ids_of(names: Sequence[str]) -> list[str]:
    """Return the ids under which vLLM may know the requests that `bodies_of` makes for completions with these names.

    A request for several completions has the name of the first, so vLLM does not know all of these ids.
    """
    return [f"{_PREFIX}{name}" for name in names]


def _body(request: GenerateRequest, can: Capabilities, asked: SentRequest, start: int, num: int) -> dict[str, Any]:
    params = _sampling(request.sampling, start, num, can.max_model_len - len(request.prompt_token_ids))
    if can.drafts and request.num_continued:
        params["extra_args"] = {CONTINUED: request.num_continued}
    salt = hashlib.sha256(asked.cache_key.encode()).hexdigest()  # vLLM allows neither @ nor / in it
    body = {
        "model": can.model,
        "request_id": asked.name,
        "token_ids": list(request.prompt_token_ids),
        "cache_salt": salt,
        "sampling_params": params,
    }
    return body | _images(request, salt) if request.images else body


def _images(request: GenerateRequest, salt: str) -> dict[str, Any]:
    """Return the fields of a body that contain the prompt's images; vLLM itself repeats each image's placeholder.

    vLLM caches the features of an image under the image's name, and still uses them after an update of the vision
    tower. The name therefore begins with the ``salt``, which differs between weight versions.
    """
    token_ids: list[int] = []
    end = 0
    for image in request.images:
        token_ids += request.prompt_token_ids[end : image.start + 1]
        end = image.end
    urls = [image.url for image in request.images]
    return {
        "token_ids": [*token_ids, *request.prompt_token_ids[end:]],
        "content_parts": [
            {"type": "image_url", "url": url, "uuid": f"{salt}-{hashlib.sha256(url.encode()).hexdigest()}"}
            for url in urls
        ],
        "return_token_ids": True,
    }


def check_placed(request: GenerateRequest, answers: Sequence[Any]) -> None:
    """Raise `InvalidRequestError` unless vLLM has placed each image where the request specifies."""
    if not request.images:
        return
    with protocol_errors(GENERATE):
        found = {(tuple(it["prompt_token_ids"]), _places(it["mm_placeholders"])) for it in answers}
    wanted = tuple((image.start, image.num_tokens) for image in request.images)
    for token_ids, places in found - {(request.prompt_token_ids, wanted)}:
        raise InvalidRequestError(
            f"vLLM places images at {list(places)} (first token, number of tokens) of {len(token_ids)} tokens, but "
            f"the request at {list(wanted)} of {len(request.prompt_token_ids)}: expand placeholders with the model's "
            "own processor, and remove the placeholder's token elsewhere, which vLLM treats as an image"
        )


def parse_rendered_prompt(answer: Mapping[str, Any], urls: Sequence[str]) -> tuple[list[int], list[PromptImage]]:
    """Return the tokens to which vLLM rendered messages, and the images with these URLs at their positions."""
    with protocol_errors("/v1/chat/completions/render"):
        places = _places(answer["features"]["mm_placeholders"]) if urls else ()
        images = [
            PromptImage(url=url, start=start, num_tokens=num) for url, (start, num) in zip(urls, places, strict=True)
        ]
        return list(answer["token_ids"]), images


def _places(placeholders: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    return tuple((int(it["offset"]), int(it["length"])) for it in placeholders["image"])


def _sampling(sampling: SamplingParams, start: int, num: int, room: int) -> dict[str, Any]:
    shared = {"temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos"}  # the names are vLLM's
    params = sampling.model_dump(mode="json", include=shared)
    params |= {"n": num, "max_tokens": sampling.max_tokens or room, "include_stop_str_in_output": True, "logprobs": 0}
    return params if sampling.seed is None else params | {"seed": _first_seed(sampling.seed) + start}


def _first_seed(seed: int) -> int:
    """Return the seed of completion 0. vLLM counts up from it, so neighbouring seeds must map to distant ones."""
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=7).digest())


def scoring_body_of(request: ScoreRequest, can: Capabilities, asked: SentRequest) -> dict[str, Any]:
    """Return the body of ``POST /inference/v1/generate`` that scores tokens; one more token is sampled after them."""
    return {
        "model": can.model,
        "request_id": asked.name,
        "token_ids": list(request.token_ids),
        "cache_salt": hashlib.sha256(asked.cache_key.encode()).hexdigest(),
        "sampling_params": {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "prompt_logprobs": request.top_k},
    }


def label_of_scored(answer: Mapping[str, Any]) -> Any:
    """Return the version labels of the token that was sampled after the scored tokens."""
    return answer["choices"][0]["weight_versions"]


def scores_of(request: ScoreRequest, answer: Mapping[str, Any], version: int) -> ScoreResponse:
    """Return vLLM's logprobs of a prompt as scores of ``version``.

    Raises `NonFiniteError` for broken weights, and `ProtocolError` if the answer cannot be read.
    """
    with protocol_errors(GENERATE):
        rows = [
            {int(token): float(found["logprob"]) for token, found in row.items()}
            for row in answer["prompt_logprobs"][request.start :]
        ]
        logprobs = [row[token] for token, row in zip(request.token_ids[request.start :], rows, strict=True)]
        # A row also contains the scored token, which need not be among the likeliest.
        best = [sorted(row.items(), key=lambda it: -it[1])[: request.top_k] for row in rows]
    if any(logprob <= _FLOOR for row in rows for logprob in row.values()):
        raise NonFiniteError("scored logprobs are not finite: the served weights are broken; publish valid weights")
    return ScoreResponse(
        request_id=request.request_id,
        start=request.start,
        logprobs=tuple(logprobs),
        top_token_ids=tuple(tuple(token for token, _ in row) for row in best) if request.top_k else (),
        top_logprobs=tuple(tuple(logprob for _, logprob in row) for row in best) if request.top_k else (),
        version_spans=(VersionSpan(version=version, start=0, end=len(logprobs)),),
    )


def is_refused_for_now(status: int, answer: Any) -> bool:
    """Return whether vLLM has refused a request that may be sent again; nothing has been sampled for it.

    vLLM 0.33 refuses requests during a pause in mode ``abort`` or ``wait``. Earlier releases keep them until sampling
    resumes.
    """
    error = answer.get("error") if isinstance(answer, dict) else None
    return status == 503 and isinstance(error, dict) and error.get("type") == REFUSED_FOR_NOW


def choices_of(answers: Sequence[Any]) -> list[Any]:
    """Return vLLM's answer for each completion in `bodies_of`. Raises `ProtocolError` if an answer cannot be read."""
    with protocol_errors(GENERATE):
        return [
            choice | {"metrics": answer.get("metrics") if len(answer["choices"]) == 1 else None}
            for answer in answers
            for choice in sorted(answer["choices"], key=lambda c: c["index"])
        ]


def version_labels_of(choice: Mapping[str, Any]) -> Any:
    """Return the version labels of a completion's tokens."""
    return choice["weight_versions"]


def response_of(request: GenerateRequest, choices: Sequence[Any]) -> GenerateResponse:
    """Return vLLM's answers for all completions as one response; None stands for a completion that was not sampled.

    Raises `NonFiniteError` for broken weights, and `ProtocolError` if the answers cannot be read.
    """
    with protocol_errors(GENERATE):
        completions = tuple(
            unsampled_completion(index) if choice is None else _completion(choice, index)
            for index, choice in enumerate(choices)
        )
    return GenerateResponse(request_id=request.request_id, completions=completions)


def tokens_of(choice: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the tokens and logprobs of a completion, or of a part of it. Raises `NonFiniteError`."""
    content = (choice["logprobs"] or {}).get("content") or []
    logprobs = tuple(float(token["logprob"]) for token in content)
    if any(logprob <= _FLOOR for logprob in logprobs):
        raise NonFiniteError("sampled logprobs are not finite: the served weights are broken; publish valid weights")
    return tuple(choice["token_ids"]), logprobs


def _completion(choice: Mapping[str, Any], index: int) -> Completion:
    token_ids, logprobs = tokens_of(choice)
    return Completion(
        index=index,
        token_ids=token_ids,
        logprobs=logprobs,
        version_spans=spans_of(choice["weight_versions"], len(token_ids)),
        finish_reason=choice["finish_reason"],
        draft_counts=_draft_counts(choice.get("metrics")),
    )


def _draft_counts(metrics: Mapping[str, Any] | None) -> DraftCounts | None:
    """Return vLLM's draft counts for one request; None if there are none, for example after an abort."""
    counted = (metrics or {}).get("speculative_decoding")
    if counted is None:
        return None
    return DraftCounts(num_verifications=counted["num_spec_steps"], num_accepted=counted["num_accepted_draft_tokens"])
