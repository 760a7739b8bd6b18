"""Level ``tokens``: whether an endpoint that serves a mixture of experts reports the experts that computed the tokens.

Shape suffixes: T tokens, L layers, K experts per token in each layer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from inflight.conformance.checks import check, fail, look_at, require, skip
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.models import make_tiny_model
from inflight.conformance.reference import ReferenceCheckpoint
from inflight.contracts import DraftingEndpoint, InferenceEndpoint
from inflight.errors import ConfigError, UnsupportedError
from inflight.model.checkpoints import load_causal_lm
from inflight.wire import (
    Capabilities,
    Completion,
    DraftHistory,
    GenerateRequest,
    InFlightPolicy,
    PromptHistory,
    RoutedExperts,
)

LEVEL = "tokens"
_CHOSEN = 2
"""Number of experts per token in each layer of the kit's mixture of experts."""
_LENGTHS = ((3, 24), (17, 9), (40, 15))
"""Numbers of tokens in a prompt and in its completion."""
_GREEDY = {"temperature": 0.0, "n": 1}
_SAMPLED_S = 0.05
"""Seconds that a completion has to sample its first tokens before an update begins."""
_WRONG = {"float32": 0.002, "float64": 0.002}
"""Maximum share of tokens, over all layers, whose experts may differ because sums are rounded in a different order."""


@check("E-80", "fresh", deadline_s=180)
@look_at(
    "which token a row belongs to (the first row is the first prompt token's, the last sampled token has none), the "
    "order of rows where several sequences share a step, and prefixes that were computed by an earlier request"
)
async def experts(subject: EndpointSubject) -> None:
    """Where routed_experts are supported, a completion whose request asks for them reports, for each token that went
    through the model, prompt included, the experts that the model's routers choose for it after the same tokens. If a
    token is recomputed under new weights, the experts that were recorded first are reported."""
    path, endpoint, can = await start_mixture(subject)
    if not can.routed_experts:
        skip("routed_experts are not supported, even for a mixture of experts")
    requests = []
    for num, most in _LENGTHS:
        prompt = [token % can.vocab_size for token in subject.prompt(num, seed=num)]
        request = subject.request(prompt, max_tokens=most, n=2, seed=None)
        requests.append(request.model_copy(update={"routed_experts": True}))
    silent = subject.request(requests[0].prompt_token_ids[:5], max_tokens=30)
    wrong = total = 0
    for number in range(3):  # from the second time on, prefixes may be cached
        if number == 2:
            if not (can.drafts and isinstance(endpoint, DraftingEndpoint)):
                break
            requests = [it.model_copy(update={"sampling": it.sampling.model_copy(update=_GREEDY)}) for it in requests]
            await endpoint.record_history(await _history(endpoint, requests, can.vocab_size))
        requests = [it.model_copy(update={"request_id": f"{it.request_id}+"}) for it in requests]
        silent = silent.model_copy(update={"request_id": f"{silent.request_id}+"})
        *answers, unasked = await asyncio.gather(*(endpoint.generate(it) for it in (*requests, silent)))
        require(
            unasked.completions[0].routed_experts is None,
            "a completion has routed_experts that its request did not ask for",
        )
        for request, answer in zip(requests, answers, strict=True):
            for completion in answer.completions:
                ids = (*request.prompt_token_ids, *completion.token_ids)
                expected_TLK = _chosen(path, can.dtype, ids[:-1])
                found_TLK = _rows(completion, expected_TLK.shape)
                differs_TL = (np.sort(found_TLK, axis=-1) != np.sort(expected_TLK, axis=-1)).any(axis=-1)
                wrong, total = wrong + int(differs_TL.sum()), total + differs_TL.size
    allowed = _WRONG.get(can.dtype, 0.1)
    subject.note(**{"tokens and layers": total, "with other experts": wrong})
    require(wrong <= allowed * total, f"{wrong} of {total} choices of experts differ from those of the model's routers")
    if InFlightPolicy.RECOMPUTE in can.in_flight_policies and {"gloo", "nccl"} & set(can.transports):
        await _require_first_records(subject, path, endpoint, can)


async def _history(endpoint: InferenceEndpoint, requests: Sequence[GenerateRequest], vocab_size: int) -> DraftHistory:
    """Return a history of newly sampled completions with every sixth token replaced, so that some drafts are accepted
    and others rejected."""
    entries = []
    for request in requests:
        sampled = request.model_copy(update={"request_id": f"{request.request_id}-history"})
        ids = list((await endpoint.generate(sampled)).completions[0].token_ids)
        ids[5::6] = [(token + 1) % vocab_size for token in ids[5::6]]
        entry = PromptHistory(prompt_token_ids=request.prompt_token_ids, completions=(tuple(ids),), rewards=(0.0,))
        entries.append(entry)
    return DraftHistory(entries=tuple(entries))


async def start_mixture(subject: EndpointSubject) -> tuple[Path, InferenceEndpoint, Capabilities]:
    """Start another endpoint, which serves a mixture of experts; return the model's path, the endpoint and its
    capabilities. Skip the check if the endpoint does not start with such a model."""
    path = make_tiny_model(subject.directory / "experts", family="qwen3_moe")
    try:
        endpoint = (await subject.fresh(path)).endpoint
        return path, endpoint, await endpoint.capabilities()
    except Exception as error:  # a factory may raise anything for this model
        if subject.capabilities.routed_experts and not isinstance(error, ConfigError | UnsupportedError):
            raise
        skip(f"the endpoint does not start with a mixture of experts: {type(error).__name__}: {error}")


async def _require_first_records(
    subject: EndpointSubject, path: Path, endpoint: InferenceEndpoint, can: Capabilities
) -> None:
    """Require that a completion that an update recomputes reports the experts with which its tokens were sampled."""
    reference, publisher = ReferenceCheckpoint(path), subject.publisher_to(endpoint, can)
    reference.cast(can.dtype)
    other = reference.perturbed("B")
    paths = {0: path, 1: reference.save(other, subject.directory / "other-experts")}
    prompt = [token % can.vocab_size for token in subject.prompt(9, seed=80)]
    for length in (100, 400, can.max_model_len - len(prompt)):
        request = subject.request(prompt, max_tokens=length).model_copy(update={"routed_experts": True})
        task = subject.begin(endpoint.generate(request))
        await asyncio.sleep(_SAMPLED_S)
        await publisher.publish(other, in_flight=InFlightPolicy.RECOMPUTE)
        completion = (await task).completions[0]
        if len(completion.version_spans) == 2:
            break
        await publisher.publish(reference.weights)
        paths = {publisher.version: path, publisher.version + 1: paths[max(paths)]}
    else:
        subject.note(recomputed="not checked: no update arrived while a completion was sampled")
        return
    ids = (*request.prompt_token_ids, *completion.token_ids)[:-1]
    old_TLK, new_TLK = (_chosen(paths[span.version], can.dtype, ids) for span in completion.version_spans)
    num_old = len(request.prompt_token_ids) + completion.version_spans[1].start - 1
    expected_TLK = np.concatenate([old_TLK[:num_old], new_TLK[num_old:]])
    found_TLK = _rows(completion, expected_TLK.shape)
    wrong_TL = (np.sort(found_TLK, axis=-1) != np.sort(expected_TLK, axis=-1)).any(axis=-1)
    subject.note(**{"tokens before and after a recompute": (num_old, len(ids) - num_old)})
    words = f"{int(wrong_TL.sum())} of {wrong_TL.size} choices of experts in a completion that an update recomputed"
    allowed = _WRONG.get(can.dtype, 0.1)
    require(wrong_TL.mean() <= allowed, f"{words} are not those with which its tokens were sampled")


@check("E-81")
@look_at("whether the field routed_experts of a request is checked even if the model cannot fill it")
async def unsupported_experts(subject: EndpointSubject) -> None:
    """Where routed_experts are not supported, a request that asks for them is refused with UnsupportedError."""
    if subject.capabilities.routed_experts:
        skip("routed_experts are supported")
    request = subject.request().model_copy(update={"routed_experts": True})
    try:
        await subject.endpoint.generate(request)
    except UnsupportedError as error:
        subject.note(refused_with=str(error))
        return
    fail("a request for routed_experts was answered")


def _rows(completion: Completion, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    record = completion.routed_experts
    if record is None:
        fail("routed_experts are reported as supported, but a completion has none")
    found = (record.num_tokens, record.num_layers, record.num_chosen)
    require(found == shape, f"routed_experts has the shape {found} (tokens, layers, experts), not {shape}")
    return _numbers(record).reshape(shape).astype(np.int64)


def _numbers(record: RoutedExperts) -> npt.NDArray[np.generic]:
    return np.frombuffer(record.to_bytes(), np.dtype(record.dtype).newbyteorder("<"))


@torch.no_grad()
def _chosen(path: Path, dtype: str, token_ids: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the experts [T, L, K] that the routers choose in transformers."""
    model = load_causal_lm(path, attention="sdpa", dtype=dtype)
    logits = model(torch.tensor([list(token_ids)]), use_cache=False, output_router_logits=True).router_logits
    return np.stack([logits_TE.topk(_CHOSEN, dim=-1).indices.numpy() for logits_TE in logits], axis=1)
