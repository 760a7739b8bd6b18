"""Reads slime's rollouts: the files that ``--save-debug-rollout-data`` writes, one for each rollout.

A file is the ``torch.save`` output of ``{"rollout_id": int, "samples": [...]}``; a sample is a dict of the fields of
slime's ``Sample`` (slime/utils/types.py). Only plain values, tensors and numpy arrays are read from it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from inflight.errors import ConfigError
from inflight.replay.importing import Found, are_ids, are_numbers, field_of, grouped, is_name, is_number
from inflight.types import Group, Rollout
from inflight.wire import VersionSpan

_MAX_EXPANSION = 8
"""Largest allowed ratio of the total size of the tensors to the size of the file, because tensors may share stored
memory."""
_FINISH = {"completed": "stop", "truncated": "length", "aborted": "abort", "failed": "abort"}


def read_slime(files: Sequence[Path], *, temperature: float, reward_key: str | None) -> Found:
    """Return the groups of each file, in the order of their ``rollout_id``. Raises `ConfigError` for an unusable file.

    Versions are counted from the oldest one in the files. slime records which versions a sample saw, but not where they
    changed, so a sample with several versions counts as sampled from its oldest one.
    """
    found = Found()
    versions: list[int] = []
    numbered: list[tuple[int, Path]] = []
    for path in files:
        dump = _load(path)
        numbered.append((dump["rollout_id"], path))
        versions += [min(seen) for sample in dump["samples"] if (seen := _versions(sample))]
    oldest = min(versions, default=0)
    found.steps = _steps([path for _, path in sorted(numbered)], found, oldest, temperature, reward_key)
    return found


def _steps(
    files: Sequence[Path], found: Found, oldest: int, temperature: float, reward_key: str | None
) -> Iterator[list[Group]]:
    num_items = 0
    for version, path in enumerate(files):
        samples = _load(path)["samples"]
        num_of_execution = Counter(it for sample in samples if type(it := sample.get("rollout_id")) is int)
        rollouts: list[tuple[Any, Rollout]] = []
        for number, sample in enumerate(samples):
            where = f"{path}, sample {number}"
            if sample.get("response_length") == 0:
                found.assumed["the response is empty, so the sample is omitted"] += 1
                continue
            rollout = _rollout_of(sample, where, found, version, oldest, temperature, reward_key)
            if num_of_execution[sample.get("rollout_id")] > 1:  # slime's sub-agents and compacted contexts
                rollout = replace(rollout, episode=sample["rollout_id"])
            key = field_of(sample, "group_index", lambda it: it is None or is_name(it), "a number", where)
            rollouts.append(((*rollout.prompt_token_ids,) if key is None else key, rollout))
        groups = grouped(rollouts, num_items)
        num_items += len(groups)
        yield groups


def _numpys() -> list[Any]:
    """Return the classes that pickles of numpy arrays and numbers refer to, by their names in numpy 1 and 2."""
    made_by = (getattr(np._core.multiarray, name) for name in ("_reconstruct", "scalar"))  # type: ignore[attr-defined]
    named = [(it, f"numpy.{core}.multiarray.{it.__name__}") for it in made_by for core in ("core", "_core")]
    numbers = [type(np.dtype(kind)) for kind in "?bBhHiIlLqQefd"]
    return [*named, np.ndarray, np.dtype, *numbers]


def _load(path: Path) -> dict[str, Any]:
    try:
        with torch.serialization.safe_globals(_numpys()):
            dump = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except Exception as error:  # torch raises various errors for files that it did not write
        raise ConfigError(
            f"{str(path)!r} is not a file that can be read without running code from it: "
            f"{' '.join(str(error).split())[:200]}. Store the samples again as lists, numbers, strings and tensors"
        ) from error
    if not (
        isinstance(dump, dict)
        and type(dump.get("rollout_id")) is int
        and isinstance(dump.get("samples"), list)
        and dump["samples"]
        and all(isinstance(sample, dict) for sample in dump["samples"])
    ):
        raise ConfigError(
            f"{str(path)!r} is not a rollout of slime: it does not contain a rollout_id and a list of samples"
        )
    _refuse_expansion(path, (value for sample in dump["samples"] for value in sample.values()))
    samples = [{name: _plain(value) for name, value in sample.items()} for sample in dump["samples"]]
    return {"rollout_id": dump["rollout_id"], "samples": samples}


def _refuse_expansion(path: Path, values: Iterator[Any]) -> None:
    """Raise `ConfigError` if arrays are much larger than the file: a few bytes can represent a tensor of any shape."""
    parts = (part for it in values for part in (it.values() if isinstance(it, dict) else (it,)))
    arrays = (it for it in parts if isinstance(it, torch.Tensor | np.ndarray))
    size_bytes = sum(math.prod(it.shape) * it.itemsize for it in arrays)
    if size_bytes > _MAX_EXPANSION * path.stat().st_size:
        raise ConfigError(
            f"{str(path)!r} has {path.stat().st_size} bytes, but its tensors would have {size_bytes}: it is damaged"
        )


def _plain(value: Any) -> Any:
    """Convert a tensor, numpy array or numpy number to Python values; return anything else unchanged."""
    return value.tolist() if isinstance(value, torch.Tensor | np.ndarray | np.generic) else value


def _rollout_of(
    sample: Mapping[str, Any],
    where: str,
    found: Found,
    version: int,
    oldest: int,
    temperature: float,
    reward_key: str | None,
) -> Rollout:
    token_ids = field_of(sample, "tokens", are_ids, "a list of token ids", where)
    num_tokens = field_of(
        sample,
        "response_length",
        lambda it: type(it) is int and 0 < it < len(token_ids),
        "a positive number below the number of tokens",
        where,
    )
    completion = token_ids[-num_tokens:]
    mask = field_of(sample, "loss_mask", lambda it: it is None or are_numbers(it), "a list of 0 and 1", where)
    mask = [1] * num_tokens if mask is None else mask
    if len(mask) != num_tokens:
        raise ConfigError(f"{where}: loss_mask has {len(mask)} entries for {num_tokens} tokens")
    if sample.get("multimodal_inputs"):
        raise ConfigError(f"{where} has images, which slime does not store in a form that can be read back")
    if sample.get("remove_sample"):
        mask = [0] * num_tokens  # as slime does
    if sample.get("rollout_routed_experts") is not None:
        found.assumed["the experts that computed its tokens (rollout_routed_experts) are omitted"] += 1
    logprobs = field_of(
        sample, "rollout_log_probs", lambda it: it is None or are_numbers(it), "a list of numbers", where
    )
    if logprobs is None:
        found.lacks.add("behaviour_logprobs")
        logprobs = [math.nan] * num_tokens
    elif len(logprobs) != num_tokens:
        raise ConfigError(f"{where}: rollout_log_probs has {len(logprobs)} entries for {num_tokens} tokens")
    at = _sampled_from(sample, found, version, oldest)
    return Rollout(
        prompt_token_ids=token_ids[:-num_tokens],
        completion_token_ids=completion,
        behaviour_logprobs=[float(it) for it in logprobs],
        version_spans=tuple(VersionSpan(version=at, start=start, end=end) for start, end in _stretches(mask)),
        finish_reason=_FINISH.get(str(sample.get("status")), "stop"),
        reward=_reward_of(sample, reward_key, where),
        temperature=temperature,
    )


def _sampled_from(sample: Mapping[str, Any], found: Found, version: int, oldest: int) -> int:
    versions = _versions(sample)
    if not versions:
        found.assumed["no weight version is stored: assumed to be that of the step"] += 1
        return version
    if len({*versions}) > 1:
        found.assumed["several versions sampled it at unknown positions: assumed to be the oldest"] += 1
    if (at := min(versions) - oldest) > version:
        found.assumed["its version is newer than the step: assumed to be that of the step"] += 1
    return min(at, version)


def _versions(sample: Mapping[str, Any]) -> list[int]:
    """Return the weight versions of a sample, without those that are not numbers."""
    listed = sample.get("weight_versions")
    return [int(it) for it in listed if str(it).isdecimal()] if isinstance(listed, list) else []


def _reward_of(sample: Mapping[str, Any], key: str | None, where: str) -> float:
    reward: Any = sample.get("reward")
    if isinstance(reward, dict):
        if key is None:
            raise ConfigError(
                f"{where}: the reward has several values, {sorted(map(str, reward))}: choose one with --reward-key"
            )
        reward = _plain(reward.get(key))
    if not is_number(reward):
        raise ConfigError(f"{where}: reward is {str(reward)[:80]!r}, not a number")
    return float(reward)


def _stretches(mask: Sequence[float]) -> list[tuple[int, int]]:
    """Return where runs of ones begin and end."""
    borders = [i for i in range(len(mask) + 1) if bool(i and mask[i - 1]) != bool(i < len(mask) and mask[i])]
    return list(zip(borders[::2], borders[1::2], strict=True))
