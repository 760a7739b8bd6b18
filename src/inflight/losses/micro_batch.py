"""Micro-batches: samples packed one after another in the target-aligned layout, and checked at their targets.

Shape suffixes: T packed tokens, N targets (tokens with a true loss mask), L layers, K experts of a token in a layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from inflight.errors import InvalidRequestError, NonFiniteError
from inflight.model.prefixes import prefix_ids
from inflight.types import FREE_EXPERT, OBSERVED, MicroBatch, Sample, TeacherScores

Int64s = npt.NDArray[np.int64]

NO_GROUP = -1
"""The group of a segment that is not a completion."""
NO_TEACHER = -1
"""The teacher of a segment that no teacher scores."""


ImageTensors = Callable[[Sequence[str]], Mapping[str, torch.Tensor]]
"""Returns the tensors that a model's processor makes from images' data URLs; for example, `ImageProcessor.tensors`."""


def collate(
    samples: Sequence[Sample],
    device: torch.device | str | None = None,
    image_tensors: ImageTensors | None = None,
    *,
    share_prefixes: bool = False,
) -> MicroBatch:
    """Return the samples packed in order, each with its prompt and completion as one segment.

    Without samples, returns `empty_micro_batch`. With ``share_prefixes``, the micro-batch states which tokens have the
    same prefix, for a `PrefixSharingWorker`. A temperature of 0 (greedy) becomes 1, because behaviour logprobs are then
    computed from the unscaled logits. Values at masked tokens become 0. ``image_tensors`` is required if rollouts have
    images. Raises `InvalidRequestError` for a sample that has no prompt or whose fields differ in length.
    """
    if not samples:
        return empty_micro_batch(device)
    for index, sample in enumerate(samples):
        _check(sample, index)
    has_reference = _have_all("reference_logprobs", [sample.reference_logprobs for sample in samples])
    has_teacher = _have_all("rollout.teacher", [sample.rollout.teacher for sample in samples])
    lengths = tuple(sample.rollout.num_tokens for sample in samples)
    places = _places(samples)

    def per_token(of_completion: Callable[[Sample], Sequence[float]], dtype: type[np.generic]) -> npt.NDArray[Any]:
        values_T = np.zeros(sum(lengths), dtype)
        for sample, (start, end) in zip(samples, places, strict=True):
            values_T[start:end] = of_completion(sample)
        return values_T

    loss_mask_T = per_token(lambda s: s.loss_mask, np.bool_)

    def at_targets(of_completion: Callable[[Sample], Sequence[float]]) -> npt.NDArray[Any]:
        return np.where(loss_mask_T, per_token(of_completion, np.float32), np.float32(0.0))

    temperature_S = np.array([sample.rollout.temperature or 1.0 for sample in samples], np.float32)
    values: dict[str, npt.NDArray[Any]] = {
        "token_ids_T": _token_ids(samples, lengths, places),
        "position_ids_T": np.concatenate([np.arange(length) for length in lengths]),
        "segment_ids_T": np.repeat(np.arange(len(samples)), lengths),
        "loss_mask_T": loss_mask_T,
        "behaviour_logprobs_T": at_targets(lambda s: s.rollout.behaviour_logprobs),
        "advantages_T": at_targets(lambda s: s.advantages),
        "temperature_T": np.repeat(temperature_S, lengths),
        "versions_T": _versions(samples, lengths, places),
        "group_ids_S": np.array([sample.group_index for sample in samples]),
    }
    if has_reference:
        values["reference_logprobs_T"] = at_targets(lambda s: s.reference_logprobs or ())
    if has_teacher:
        teachers = [sample.rollout.teacher for sample in samples if sample.rollout.teacher is not None]
        values |= _of_teachers(teachers, places, loss_mask_T)
    first_tokens_T = None
    if share_prefixes:
        values["prefix_ids_T"] = first_tokens_T = prefix_ids([sample.rollout for sample in samples])
    if any(sample.rollout.routed_experts is not None for sample in samples):
        values["routed_experts_TLK"] = _routed_experts(samples, lengths)
    # With numpy: for tensors of this size torch starts threads that cost more than the work.
    tensors: dict[str, Any] = {name: torch.from_numpy(array).to(device) for name, array in values.items()}
    images = _images_of(samples, lengths, first_tokens_T, device, image_tensors)
    return MicroBatch(segment_lengths=lengths, **tensors, **images)


def _have_all(name: str, values: Sequence[object]) -> bool:
    """Return whether all samples have a value. Raises `InvalidRequestError` if only some do."""
    known = [value is not None for value in values]
    if any(known) != all(known):
        raise InvalidRequestError(f"sample {known.index(False)} has no {name} but others do: give it to all or none")
    return all(known)


def _of_teachers(
    teachers: Sequence[TeacherScores], places: Sequence[tuple[int, int]], loss_mask_T: npt.NDArray[np.bool_]
) -> dict[str, npt.NDArray[Any]]:
    """Return the fields with the teacher's scores of each sample's targets."""
    widths = {len(row) for it in teachers for row in it.top_token_ids}
    if len(widths) > 1 or (widths and not all(it.top_token_ids for it in teachers)):
        raise InvalidRequestError(
            "the teachers' scores of the samples (rollout.teacher) have different numbers of top_token_ids; request "
            "the same top_k for all"
        )
    num_top = max(widths, default=0)
    logprobs_T = np.zeros(len(loss_mask_T), np.float32)
    top_ids_TK = np.zeros((len(loss_mask_T), num_top), np.int64)
    top_logprobs_TK = np.zeros((len(loss_mask_T), num_top), np.float32)
    for it, (start, end) in zip(teachers, places, strict=True):
        logprobs_T[start:end] = np.nan if it.logprobs is None else it.logprobs
        if num_top:
            top_ids_TK[start:end], top_logprobs_TK[start:end] = it.top_token_ids, it.top_logprobs
    logprobs_T[~loss_mask_T] = 0.0
    top_ids_TK[~loss_mask_T], top_logprobs_TK[~loss_mask_T] = 0, 0.0
    fields: dict[str, npt.NDArray[Any]] = {
        "teacher_ids_S": np.array([it.teacher for it in teachers]),
        "teacher_logprobs_T": logprobs_T,
    }
    if num_top:
        fields |= {"teacher_top_ids_TK": top_ids_TK, "teacher_top_logprobs_TK": top_logprobs_TK}
    return fields


def _images_of(
    samples: Sequence[Sample],
    lengths: Sequence[int],
    first_tokens_T: Int64s | None,
    device: torch.device | str | None,
    image_tensors: ImageTensors | None,
) -> dict[str, Any]:
    """Return the image fields; an image in a shared prefix is included only once, where the prefix first occurs."""
    starts = [0, *itertools.accumulate(lengths)]
    placed = [(start, image) for start, sample in zip(starts, samples, strict=False) for image in sample.rollout.images]
    if first_tokens_T is not None:
        placed = [(start, it) for start, it in placed if first_tokens_T[start + it.end - 1] == start + it.end - 1]
    if not placed:
        return {}
    if image_tensors is None:
        raise InvalidRequestError("the rollouts have images: give collate the image_tensors of the model's processor")
    rows = [row for start, image in placed for row in range(start + image.start, start + image.end)]
    made = image_tensors([image.url for _, image in placed])
    return {
        "image_rows_M": torch.tensor(rows, device=device),
        "image_tensors": {name: tensor.to(device) for name, tensor in made.items()},
    }


def _places(samples: Sequence[Sample]) -> list[tuple[int, int]]:
    """Return the start and end of each sample's completion among the packed tokens."""
    ends = [*itertools.accumulate(sample.rollout.num_tokens for sample in samples)]
    return [(end - len(s.rollout.completion_token_ids), end) for s, end in zip(samples, ends, strict=True)]


def _token_ids(samples: Sequence[Sample], lengths: Sequence[int], places: Sequence[tuple[int, int]]) -> Int64s:
    ids_T = np.empty(sum(lengths), np.int64)
    for sample, length, (start, end) in zip(samples, lengths, places, strict=True):
        ids_T[end - length : start] = sample.rollout.prompt_token_ids
        ids_T[start:end] = sample.rollout.completion_token_ids
    return ids_T


def _versions(samples: Sequence[Sample], lengths: Sequence[int], places: Sequence[tuple[int, int]]) -> Int64s:
    versions_T = np.full(sum(lengths), OBSERVED)
    for sample, (start, _) in zip(samples, places, strict=True):
        for span in sample.rollout.version_spans:
            versions_T[start + span.start : start + span.end] = span.version
    return versions_T


def _routed_experts(samples: Sequence[Sample], lengths: Sequence[int]) -> npt.NDArray[np.int16]:
    records = [sample.rollout.routed_experts for sample in samples]
    shapes = {(it.num_layers, it.num_chosen) for it in records if it is not None}
    if len(shapes) != 1:
        raise InvalidRequestError(
            "routed_experts of the samples must have the same numbers of layers and experts per token, but these "
            f"are {sorted(shapes)}"
        )
    (shape,) = shapes
    experts_TLK = np.full((sum(lengths), *shape), FREE_EXPERT, np.int16)
    for index, (record, length, end) in enumerate(zip(records, lengths, itertools.accumulate(lengths), strict=True)):
        if record is None:
            continue
        if record.num_tokens > length:
            raise InvalidRequestError(
                f"sample {index} has {length} tokens but routed_experts has {record.num_tokens} rows"
            )
        dtype = np.dtype(record.dtype).newbyteorder("<")
        rows_RLK = np.frombuffer(record.to_bytes(), dtype).reshape(record.num_tokens, *shape)
        start = end - length
        known = np.where(rows_RLK == np.iinfo(dtype).max, np.int32(FREE_EXPERT), rows_RLK)
        if known.size and known.max() > np.iinfo(np.int16).max:
            raise InvalidRequestError(
                f"sample {index} names expert {known.max()}, but at most {np.iinfo(np.int16).max} is supported"
            )
        experts_TLK[start : start + record.num_tokens] = known
    return experts_TLK


def empty_micro_batch(device: torch.device | str | None = None) -> MicroBatch:
    """Return a micro-batch of two tokens without a target, for a rank that has run out of data.

    Every rank must run the same forward and backward passes, or their collectives would wait forever. The loss and
    gradient of this micro-batch are 0, its metrics have a weight of 0, and no denominator counts it.
    """

    def zeros(dtype: torch.dtype) -> torch.Tensor:
        # Each field has its own tensor: tensors that share memory cannot be sent.
        return torch.zeros(2, dtype=dtype, device=device)

    return MicroBatch(
        token_ids_T=zeros(torch.int64),
        position_ids_T=torch.arange(2, device=device),
        segment_ids_T=zeros(torch.int64),
        segment_lengths=(2,),
        loss_mask_T=zeros(torch.bool),
        behaviour_logprobs_T=zeros(torch.float32),
        advantages_T=zeros(torch.float32),
        temperature_T=torch.ones(2, device=device),
        versions_T=torch.full((2,), -1, device=device),
        reference_logprobs_T=zeros(torch.float32),
        teacher_logprobs_T=zeros(torch.float32),
        teacher_top_ids_TK=zeros(torch.int64)[:, None],
        teacher_top_logprobs_TK=zeros(torch.float32)[:, None],
        teacher_ids_S=torch.full((1,), NO_TEACHER, device=device),
        group_ids_S=torch.full((1,), NO_GROUP, device=device),
    )


_KINDS: Mapping[str, torch.dtype | None] = {
    "loss_mask_T": torch.bool,
    "segment_ids_T": torch.int64,
    "versions_T": torch.int64,
    "group_ids_S": torch.int64,
    "behaviour_logprobs_T": None,
    "advantages_T": None,
    "reference_logprobs_T": None,
    "teacher_logprobs_T": None,
    "teacher_top_ids_TK": torch.int64,
    "teacher_top_logprobs_TK": None,
    "teacher_ids_S": torch.int64,
    "proximal_logprobs_T": None,
}
"""The dtype of each field that losses read; None stands for any floating-point dtype."""


def check_micro_batch(batch: MicroBatch, **of_trainer_T: torch.Tensor | None) -> None:
    """Raise `InvalidRequestError` unless the fields that losses read, and any additional per-token values, are valid.

    Checks shapes, dtypes, devices and the range of segment ids.
    """
    num_segments = len(batch.segment_lengths)
    device = batch.loss_mask_T.device
    fields = {name: getattr(batch, name) for name in _KINDS}
    for name, tensor in (fields | of_trainer_T).items():
        if tensor is None:
            continue
        length = num_segments if name.endswith("_S") else batch.num_tokens
        if tensor.shape[:1] != (length,) or tensor.dim() != (2 if name.endswith("_TK") else 1):
            raise InvalidRequestError(
                f"{name} is {list(tensor.shape)}, but the micro-batch has {batch.num_tokens} tokens in "
                f"{num_segments} segments"
            )
        wanted = _KINDS.get(name)
        if tensor.dtype != wanted if wanted is not None else not tensor.dtype.is_floating_point:
            raise InvalidRequestError(f"{name} must be {wanted or 'floating-point'}, not {tensor.dtype}")
        if tensor.device != device:
            raise InvalidRequestError(f"{name} is on {tensor.device}, loss_mask_T on {device}: move one of them")
    ids_T = batch.segment_ids_T
    if ((ids_T < 0) | (ids_T >= num_segments)).any():
        raise InvalidRequestError(
            f"segment_ids_T go from {int(ids_T.min())} to {int(ids_T.max())}, but the micro-batch has {num_segments} "
            "segments"
        )


def check_groups(batches: Sequence[MicroBatch], num_groups: int) -> None:
    """Raise `InvalidRequestError` unless the group ids of all targets are below ``num_groups``."""
    for batch in batches:
        if batch.group_ids_S is None:
            continue
        ids_N = batch.group_ids_S[batch.segment_ids_T[batch.loss_mask_T]]
        if ids_N.numel() and not 0 <= ids_N.min() <= ids_N.max() < num_groups:
            raise InvalidRequestError(
                f"group_ids_S of targets go from {int(ids_N.min())} to {int(ids_N.max())}, but num_groups is "
                f"{num_groups}"
            )


def check_finite(rows_N: torch.Tensor, **values: torch.Tensor | None) -> None:
    """Raise `NonFiniteError` if a value [N] at a target is not finite; ``rows_N`` are the targets' packed tokens."""
    named = {name: values_N for name, values_N in values.items() if values_N is not None}
    # One test for all, because it synchronizes with a GPU.
    if not named or torch.stack([values_N.isfinite().all() for values_N in named.values()]).all():
        return
    for name, values_N in named.items():
        wrong_N = ~values_N.isfinite()
        if wrong_N.any():
            first = int(wrong_N.nonzero()[0])
            raise NonFiniteError(
                f"{int(wrong_N.sum())} of {len(values_N)} {name} at targets are not finite; the first is "
                f"{values_N[first].item()} at packed token {int(rows_N[first])}: mask such tokens, or drop their "
                "samples"
            )


def _check(sample: Sample, index: int) -> None:
    if not sample.rollout.prompt_token_ids:
        raise InvalidRequestError(f"sample {index} has no prompt: its first token cannot be predicted from anything")
    num_tokens = len(sample.rollout.completion_token_ids)
    fields: dict[str, Sequence[object]] = {
        "behaviour_logprobs": sample.rollout.behaviour_logprobs,
        "advantages": sample.advantages,
        "loss_mask": sample.loss_mask,
    }
    if sample.reference_logprobs is not None:
        fields["reference_logprobs"] = sample.reference_logprobs
    if (teacher := sample.rollout.teacher) is not None:
        if teacher.logprobs is not None:
            fields["rollout.teacher.logprobs"] = teacher.logprobs
        if teacher.top_token_ids or teacher.top_logprobs:
            fields["rollout.teacher.top_token_ids"] = teacher.top_token_ids
            fields["rollout.teacher.top_logprobs"] = teacher.top_logprobs
    for name, values in fields.items():
        if len(values) != num_tokens:
            raise InvalidRequestError(f"sample {index} has {num_tokens} completion tokens but {name} has {len(values)}")
    turns = sample.rollout.turns
    num_sampled = sum(turn.end - turn.start for turn in turns) if turns else num_tokens
    if sample.rollout.num_sampled_tokens != num_sampled:
        raise InvalidRequestError(
            f"sample {index} has {num_sampled} sampled tokens but its version_spans cover "
            f"{sample.rollout.num_sampled_tokens}"
        )
    versions = sample.rollout.token_versions() if turns else ()
    if any(kept and version == OBSERVED for kept, version in zip(sample.loss_mask, versions, strict=False)):
        raise InvalidRequestError(
            f"sample {index} has a true loss_mask at a token of an observation; only sampled tokens can be targets"
        )
