"""Converts a recorded step to JSON (its structure) and flat arrays (its tokens), and back.

docs/replay.md describes every field.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from inflight.types import Group, Rollout, Sample, TeacherScores, Turn
from inflight.wire import PromptImage, RoutedExperts, VersionSpan

Arrays = dict[str, npt.NDArray[Any]]


class StoredModel(BaseModel):
    """Base of the stored JSON objects. Keeps NaN and infinity, as Python's JSON does."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="constants")


class StepOutcome(StoredModel):
    """The results of a step, with which a replay is compared."""

    gradient_norm: float
    learning_rate: float
    metrics: tuple[dict[str, list[float]], ...]
    """Metrics of each share of the data: ``[sum, weight]`` for a mean, ``[value]`` for a maximum."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One optimizer step: its groups in order, the samples made from them, and the outcome."""

    version: int
    """Version of the weights from which the step starts."""
    groups: Sequence[Group]
    samples: Sequence[Sample]
    trainer_logprobs: Sequence[Sequence[float]] | None = None
    """The trainer logprobs of each sample, one per completion token, 0.0 where the loss has no target.

    None if unknown.
    """
    outcome: StepOutcome | None = None


class StoredRollout(StoredModel):
    """A rollout, without its tokens."""

    prompt: int
    """Index into the step's prompts."""
    num_tokens: int
    """Number of tokens of the completion."""
    spans: tuple[tuple[int, int, int], ...]
    """Start, end and version of each span of tokens that one version sampled."""
    finish_reason: str
    reward: float
    temperature: float
    turns: tuple[tuple[int, int, float | None], ...] = ()
    episode: int | None = None
    role: str = ""
    images: tuple[PromptImage, ...] = ()
    has_routed_experts: bool = False
    teacher: int | None = None
    """The index of the teacher that scored the rollout."""


class StoredGroup(StoredModel):
    """A group; ``item`` is its ``item_index``."""

    group_id: int
    item: int
    endpoint: str
    rollouts: tuple[StoredRollout, ...]


class StoredSample(StoredModel):
    """A sample, given by the rollout from which it is made and the rollout's group in the step."""

    rollout: int
    """Index into all rollouts of the step: those of the groups, followed by ``more_rollouts``."""
    group: int


class StoredStep(StoredModel):
    """A step, without its arrays."""

    version: int
    prompts: tuple[int, ...]
    """Number of tokens of each prompt."""
    groups: tuple[StoredGroup, ...]
    more_rollouts: tuple[StoredRollout, ...] = ()
    """Rollouts that a composer derived from others."""
    samples: tuple[StoredSample, ...]
    outcome: StepOutcome | None = None


def split_step(step: RecordedStep) -> tuple[StoredStep, Arrays]:
    """Return the structure and the arrays of a step. Logprobs and advantages become float32, as on the ranks."""
    prompts: dict[tuple[int, ...], int] = {}
    rollouts = [rollout for group in step.groups for rollout in group.rollouts]
    num_of_groups = len(rollouts)
    indices = {id(rollout): index for index, rollout in enumerate(rollouts)}
    for sample in step.samples:
        if indices.setdefault(id(sample.rollout), len(rollouts)) == len(rollouts):
            rollouts.append(sample.rollout)
    facts = [_facts_of(rollout, prompts.setdefault((*rollout.prompt_token_ids,), len(prompts))) for rollout in rollouts]
    rest = iter(facts)
    groups = tuple(
        StoredGroup(
            group_id=group.group_id,
            item=group.item_index,
            endpoint=group.endpoint,
            rollouts=tuple(next(rest) for _ in group.rollouts),
        )
        for group in step.groups
    )
    arrays: Arrays = {
        "prompt_token_ids": _flatten(prompts, np.int32),
        "completion_token_ids": _flatten((it.completion_token_ids for it in rollouts), np.int32),
        "behaviour_logprobs": _flatten((it.behaviour_logprobs for it in rollouts), np.float32),
        "advantages": _flatten((sample.advantages for sample in step.samples), np.float32),
        "loss_mask": _flatten((sample.loss_mask for sample in step.samples), np.bool_),
    }
    if any(sample.reference_logprobs is not None for sample in step.samples):
        arrays["reference_logprobs"] = _flatten((it.reference_logprobs or () for it in step.samples), np.float32)
    if step.trainer_logprobs is not None:
        arrays["trainer_logprobs"] = _flatten(step.trainer_logprobs, np.float32)
    for index, rollout in enumerate(rollouts):
        if (experts := rollout.routed_experts) is not None:
            shape = (experts.num_tokens, experts.num_layers, experts.num_chosen)
            dtype = np.dtype(experts.dtype).newbyteorder("<")
            arrays[f"routed_experts.{index}"] = np.frombuffer(experts.to_bytes(), dtype).reshape(shape)
        if (scores := rollout.teacher) is not None and scores.logprobs is not None:
            arrays[f"teacher_logprobs.{index}"] = np.array(scores.logprobs, np.float32)
            if scores.top_token_ids:
                arrays[f"teacher_top_token_ids.{index}"] = np.array(scores.top_token_ids, np.int32)
                arrays[f"teacher_top_logprobs.{index}"] = np.array(scores.top_logprobs, np.float32)
    samples = tuple(StoredSample(rollout=indices[id(it.rollout)], group=it.group_index) for it in step.samples)
    more = tuple(facts[num_of_groups:])
    return StoredStep(
        version=step.version,
        prompts=tuple(map(len, prompts)),
        groups=groups,
        more_rollouts=more,
        samples=samples,
        outcome=step.outcome,
    ), arrays


def _facts_of(rollout: Rollout, prompt: int) -> StoredRollout:
    return StoredRollout(
        prompt=prompt,
        num_tokens=len(rollout.completion_token_ids),
        spans=tuple((it.start, it.end, it.version) for it in rollout.version_spans),
        finish_reason=rollout.finish_reason,
        reward=rollout.reward,
        temperature=rollout.temperature,
        turns=tuple((turn.start, turn.end, turn.reward) for turn in rollout.turns),
        episode=rollout.episode,
        role=rollout.role,
        images=tuple(rollout.images),
        has_routed_experts=rollout.routed_experts is not None,
        teacher=None if rollout.teacher is None else rollout.teacher.teacher,
    )


def join_step(facts: StoredStep, arrays: Arrays) -> RecordedStep:
    """Return the step that was split by `split_step`. Raises ``KeyError``, ``IndexError`` or ``ValueError``."""
    of_groups = [rollout for group in facts.groups for rollout in group.rollouts]
    every = [*of_groups, *facts.more_rollouts]
    lengths = [rollout.num_tokens for rollout in every]
    prompts = _split_rows(arrays["prompt_token_ids"], facts.prompts)
    ids, logprobs = (
        _split_rows(arrays["completion_token_ids"], lengths),
        _split_rows(arrays["behaviour_logprobs"], lengths),
    )
    rollouts = [
        _rollout_of(
            it, prompts[it.prompt], ids[i], logprobs[i], arrays.get(f"routed_experts.{i}"), _scores_of(it, i, arrays)
        )
        for i, it in enumerate(every)
    ]
    rest = iter(rollouts)
    groups = [Group(it.group_id, it.item, [next(rest) for _ in it.rollouts], it.endpoint) for it in facts.groups]
    of_samples = [lengths[sample.rollout] for sample in facts.samples]

    def per_sample(name: str) -> list[list[Any]]:
        return _split_rows(arrays[name], of_samples)

    nothing = [None] * len(facts.samples)
    references = per_sample("reference_logprobs") if "reference_logprobs" in arrays else nothing
    samples = [
        Sample(rollouts[it.rollout], advantages, mask, reference, it.group)
        for it, advantages, mask, reference in zip(
            facts.samples, per_sample("advantages"), per_sample("loss_mask"), references, strict=True
        )
    ]
    trained = per_sample("trainer_logprobs") if "trainer_logprobs" in arrays else None
    return RecordedStep(facts.version, groups, samples, trained, facts.outcome)


def _rollout_of(
    facts: StoredRollout,
    prompt: Sequence[int],
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    experts: npt.NDArray[Any] | None,
    teacher: TeacherScores | None,
) -> Rollout:
    if facts.has_routed_experts and experts is None:
        raise ValueError("the routed experts of a rollout are missing")
    return Rollout(
        prompt_token_ids=prompt,
        completion_token_ids=token_ids,
        behaviour_logprobs=logprobs,
        version_spans=tuple(VersionSpan(start=start, end=end, version=at) for start, end, at in facts.spans),
        finish_reason=facts.finish_reason,
        reward=facts.reward,
        temperature=facts.temperature,
        turns=tuple(Turn(start, end, reward) for start, end, reward in facts.turns),
        episode=facts.episode,
        role=facts.role,
        images=facts.images,
        routed_experts=None if experts is None else _experts_of(experts),
        teacher=teacher,
    )


def _scores_of(facts: StoredRollout, index: int, arrays: Arrays) -> TeacherScores | None:
    if facts.teacher is None:
        return None
    if (logprobs := arrays.get(f"teacher_logprobs.{index}")) is None:
        return TeacherScores(teacher=facts.teacher)
    top_ids, top = arrays.get(f"teacher_top_token_ids.{index}"), arrays.get(f"teacher_top_logprobs.{index}")
    return TeacherScores(
        teacher=facts.teacher,
        logprobs=logprobs.tolist(),
        top_token_ids=() if top_ids is None else top_ids.tolist(),
        top_logprobs=() if top is None else top.tolist(),
    )


def _experts_of(rows: npt.NDArray[Any]) -> RoutedExperts:
    num_tokens, num_layers, num_chosen = rows.shape
    return RoutedExperts(
        num_tokens=num_tokens,
        num_layers=num_layers,
        num_chosen=num_chosen,
        dtype="uint8" if rows.dtype == np.uint8 else "uint16",
        data=base64.b64encode(rows.tobytes()).decode("ascii"),
    )


def _flatten(values: Any, dtype: type[np.generic]) -> npt.NDArray[Any]:
    rows = [np.asarray(row, dtype) for row in values]
    return np.concatenate(rows) if rows else np.empty(0, dtype)


def _split_rows(flat: npt.NDArray[Any], lengths: Sequence[int]) -> list[list[Any]]:
    """Return the rows of a flat array. Raises ``ValueError`` if their lengths do not add up to its size."""
    if flat.ndim != 1 or len(flat) != sum(lengths):
        raise ValueError(f"an array has shape {flat.shape}, but its rows have {sum(lengths)} elements")
    ends = np.cumsum([0, *lengths])
    return [flat[start:end].tolist() for start, end in itertools.pairwise(ends)]
