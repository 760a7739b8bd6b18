"""Repeats recorded sampling on an endpoint with the same weights, or scores the recorded tokens there."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from inflight.contracts import InferenceEndpoint, ScoringEndpoint
from inflight.environments.moving import without_unsupported_seed
from inflight.errors import ConfigError, UnsupportedError
from inflight.observe.trace.files import EVENTS, read_events
from inflight.observe.trace.records import read_steps
from inflight.run.config import RunConfig
from inflight.run.sampling.actor import seed_of
from inflight.types import Group, Rollout
from inflight.wire import Completion, GenerateRequest, SamplingParams, ScoreRequest


@dataclass(frozen=True, slots=True)
class Resampled:
    """One completion, as recorded and as sampled again."""

    item: int
    number: int
    num_tokens: int
    parts_at: int | None
    """Index of the first token that differs or that only one of the two has; None if all tokens are equal."""
    recorded_token: int | None
    """The recorded token at that index; None if the recorded completion ends before it."""
    token: int | None
    recorded_logprob: float | None
    """Recorded logprob of the recorded token."""
    logprob: float | None
    """Logprob of the token that was sampled in the replay."""
    largest_difference: float
    """Largest logprob difference of the tokens before that index, in nats."""
    parts_by_logprob_at: int | None
    """Index of the first of these tokens whose two logprobs differ by more than the tolerance, if there is one."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The logprobs of one recorded completion, and those that an endpoint returns for the same tokens."""

    item: int
    number: int
    num_tokens: int
    """Number of compared tokens: those that the version sampled before another version sampled any."""
    largest_difference: float
    """Largest logprob difference, in nats."""
    differs_at: int | None
    """Index of the first token whose two logprobs differ by more than the tolerance, if there is one."""


@dataclass(frozen=True, slots=True)
class SamplingReplay:
    """The results of repeated sampling on an endpoint, and of scoring the recorded tokens there."""

    sampled: Sequence[Resampled]
    """Empty if nothing could be sampled again but something could be scored."""
    scored: Sequence[Scored]
    """Empty unless the endpoint supports scoring, and the record has logprobs at temperature 1."""


@dataclass(frozen=True, slots=True)
class _Asked:
    group: Group
    numbers: tuple[int, ...]
    seed: int


async def sample_again(
    record: Path, config: RunConfig, endpoint: InferenceEndpoint, *, version: int, num_groups: int, tolerance: float
) -> list[Resampled]:
    """Repeat the recorded requests whose tokens were all sampled by ``version``, which the endpoint must serve.

    Seeds, prompts and settings are those of the run. For a record in a run directory, the events show which completions
    formed a request; otherwise each group counts as one request. Completions that were continued after an abort are
    omitted. The result is empty if no completion remains. Raises `UnsupportedError` if the endpoint does not support
    seeds, and `ConfigError` if a run has published a version other than ``version`` to it.
    """
    capabilities = await endpoint.capabilities()
    if not capabilities.seeds:
        raise UnsupportedError(
            f"{endpoint.name} does not support seeds, so its samples differ from call to call and cannot be compared"
        )
    found: list[Resampled] = []
    asked = _asked(record, config, version)
    for number, one in enumerate(itertools.islice(asked, num_groups)):
        rollout = one.group.rollouts[one.numbers[0]]
        settings = SamplingParams(
            n=len(one.numbers),
            max_tokens=config.sampling.max_tokens,
            temperature=rollout.temperature,
            seed=one.seed,
        )
        request = GenerateRequest(
            request_id=f"replay-{one.group.item_index}-{number}",
            prompt_token_ids=tuple(rollout.prompt_token_ids),
            images=tuple(rollout.images),
            sampling=settings,
        )
        response = await endpoint.generate(without_unsupported_seed(request, capabilities))
        spans = [span for completion in response.completions for span in completion.version_spans]
        _check_served(endpoint, [span.version for span in spans], version)
        for i, completion in zip(one.numbers, response.completions, strict=True):
            found.append(compared(one.group.item_index, i, one.group.rollouts[i], completion, tolerance))
    return found


def _check_served(endpoint: InferenceEndpoint, served: Sequence[int], version: int) -> None:
    if not {*served} <= {0, version}:
        raise ConfigError(
            f"{endpoint.name} serves version {max(served)}, which a run published to it, but the replay needs "
            f"version {version}: start a server with the weights of that version"
        )


async def score_again(
    record: Path, endpoint: ScoringEndpoint, *, version: int, num_groups: int, tolerance: float
) -> list[Scored]:
    """Score the recorded tokens of ``version``, which the endpoint must serve, and compare the logprobs.

    Seeds have no effect on scores, so any engine can be compared, and turns of environments as well. Tokens after an
    update are omitted, because they may depend on keys and values that older weights computed. Rollouts with images and
    rollouts that were not sampled at temperature 1 are omitted as well. Raises `ConfigError` if a run has published a
    version other than ``version`` to the endpoint.
    """
    found: list[Scored] = []
    groups = (group for step in read_steps(record) if step.version >= version for group in step.groups)
    with_tokens = (group for group in groups if any(_compared_tokens(it, version) for it in group.rollouts))
    for group in itertools.islice(with_tokens, num_groups):
        for number, rollout in enumerate(group.rollouts):
            tokens = _compared_tokens(rollout, version)
            if not tokens:
                continue
            end = tokens[-1] + 1
            request = ScoreRequest(
                request_id=f"replay-score-{group.item_index}-{number}",
                token_ids=(*rollout.prompt_token_ids, *rollout.completion_token_ids[:end]),
                start=len(rollout.prompt_token_ids),
            )
            response = await endpoint.score(request)
            _check_served(endpoint, [span.version for span in response.version_spans], version)
            differences = {i: abs(rollout.behaviour_logprobs[i] - response.logprobs[i]) for i in tokens}
            differs_at = next((i for i, it in differences.items() if it > tolerance), None)
            found.append(Scored(group.item_index, number, len(tokens), max(differences.values()), differs_at))
    return found


def _compared_tokens(rollout: Rollout, version: int) -> list[int]:
    """Return the indices of the completion tokens that ``version`` sampled before another version sampled any."""
    spans = itertools.takewhile(lambda span: span.version == version, rollout.version_spans)
    tokens = [i for span in spans for i in range(span.start, span.end)]
    is_known = all(not math.isnan(rollout.behaviour_logprobs[i]) for i in tokens)
    return tokens if rollout.temperature == 1.0 and not rollout.images and is_known else []


def compared(item: int, number: int, recorded: Rollout, again: Completion, tolerance: float) -> Resampled:
    """Return where a completion diverges from the recorded one."""
    before, after = recorded.completion_token_ids, again.token_ids
    num_shared = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), None)
    if num_shared is None and len(before) != len(after):
        num_shared = min(len(before), len(after))
    end = len(before) if num_shared is None else num_shared
    differences = [abs(recorded.behaviour_logprobs[i] - again.logprobs[i]) for i in range(end)]
    known = [it for it in differences if not math.isnan(it)]  # an imported record may lack logprobs
    has_before, has_after = end < len(before), end < len(after)
    return Resampled(
        item=item,
        number=number,
        num_tokens=len(before),
        parts_at=num_shared,
        recorded_token=before[end] if has_before else None,
        token=after[end] if has_after else None,
        recorded_logprob=recorded.behaviour_logprobs[end] if has_before and known else None,
        logprob=again.logprobs[end] if has_after else None,
        largest_difference=max(known, default=0.0),
        parts_by_logprob_at=next((i for i, it in enumerate(differences) if it > tolerance), None),
    )


def _asked(record: Path, config: RunConfig, version: int) -> Iterator[_Asked]:
    """Yield the requests that can be repeated."""
    seed, size = config.run.seed, config.sampling.group_size
    requests = _requests(record.parent)
    for step in read_steps(record):
        if step.version < version:
            continue
        for group in step.groups:
            if len(group.rollouts) != size:
                continue
            for numbers in requests.get(group.item_index, [tuple(range(size))]):
                if all(_is_from(group.rollouts[i], version) for i in numbers):
                    parts = () if len(numbers) == size else (numbers[0],)
                    yield _Asked(group, numbers, seed_of(seed, group.item_index, *parts))


def _is_from(rollout: Rollout, version: int) -> bool:
    is_one_turn = not rollout.turns and rollout.num_sampled_tokens == len(rollout.completion_token_ids)
    return is_one_turn and all(span.version == version for span in rollout.version_spans)


def _requests(directory: Path) -> Mapping[int, Sequence[tuple[int, ...]]]:
    """Return the completions of each request, by item, without requests that share completions with other requests."""
    if not (directory / EVENTS).exists():
        return {}
    found: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for event in read_events(directory, ("request",)):
        if event["parts"]:
            found[event["item"]].append(tuple(event["numbers"]))
    return {item: [it for it in asked if _is_alone(it, asked)] for item, asked in found.items()}


def _is_alone(numbers: tuple[int, ...], asked: Sequence[tuple[int, ...]]) -> bool:
    """Return whether no other request asked for any of these completions."""
    return sum(bool({*numbers} & {*other}) for other in asked) == 1


def replay_sampling(
    record: Path, config: RunConfig, endpoint: InferenceEndpoint, *, version: int, num_groups: int, tolerance: float
) -> SamplingReplay:
    """Run `score_again`, if the endpoint supports scoring, and `sample_again`; close the endpoint.

    Errors from both propagate, except an `UnsupportedError` if tokens were scored. Raises `ConfigError` if nothing can
    be compared.
    """

    async def run() -> SamplingReplay:
        scored: list[Scored] = []
        if isinstance(endpoint, ScoringEndpoint) and (await endpoint.capabilities()).scoring:
            scored = await score_again(record, endpoint, version=version, num_groups=num_groups, tolerance=tolerance)
        try:
            sampled = await sample_again(
                record, config, endpoint, version=version, num_groups=num_groups, tolerance=tolerance
            )
        except UnsupportedError:
            if not scored:
                raise
            sampled = []
        if not sampled and not scored:
            raise ConfigError(
                f"no completion of the record can be sampled again: it must come entirely from version {version} and "
                "from a single request, which excludes turns of environments"
            )
        return SamplingReplay(sampled, scored)

    async def run_and_close() -> SamplingReplay:
        try:
            return await run()
        finally:
            await endpoint.aclose()

    return asyncio.run(run_and_close())
