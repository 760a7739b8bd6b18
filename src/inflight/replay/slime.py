"""Reads slime's rollouts: the files of ``--save-debug-rollout-data``, one for each rollout.

A file is what ``torch.save`` makes of ``{"rollout_id": int, "samples": [...]}``; a sample is the fields of slime's
``Sample`` as a dict. Only plain values and tensors are read from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from inflight.errors import ConfigError
from inflight.replay.importing import Found, are_ids, field_of, grouped, is_number
from inflight.types import Rollout
from inflight.wire import VersionSpan

_FINISH = {"completed": "stop", "truncated": "length", "aborted": "abort", "failed": "abort"}


def read_slime(files: Sequence[Path], *, temperature: float, reward_key: str | None) -> Found:
    """Return the groups of each file, in the order of their ``rollout_id``. Raises `ConfigError`.

    Versions are counted from the oldest one in the files. slime tells which versions a sample saw, but not where they
    changed: such a sample counts as sampled from the oldest one.
    """
    dumps = sorted((_load(path) for path in files), key=lambda dump: int(dump["rollout_id"]))
    found = Found()
    versions = [
        _version(it) for dump in dumps for sample in dump["samples"] for it in sample.get("weight_versions", ())
    ]
    oldest = min((it for it in versions if it is not None), default=0)
    num_items = 0
    for version, dump in enumerate(dumps):
        rollouts: list[tuple[Any, Rollout]] = []
        for number, sample in enumerate(dump["samples"]):
            where = f"{dump['path']}, sample {number}"
            rollout = _rollout_of(sample, where, found, version, oldest, temperature, reward_key)
            key = sample.get("group_index")
            rollouts.append(((*rollout.prompt_token_ids,) if key is None else key, rollout))
        groups = grouped(rollouts, num_items)
        num_items += len(groups)
        found.steps.append(groups)
    return found


def _load(path: Path) -> dict[str, Any]:
    try:
        dump = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except Exception as error:  # whatever torch raises on bytes that are no file of its own
        raise ConfigError(
            f"{str(path)!r} is not a file that can be read without running code from it: "
            f"{' '.join(str(error).split())[:200]}. Store the samples again as lists, numbers, texts and tensors"
        ) from error
    if not (
        isinstance(dump, dict)
        and isinstance(dump.get("rollout_id"), int)
        and isinstance(dump.get("samples"), list)
        and dump["samples"]
        and all(isinstance(sample, dict) for sample in dump["samples"])
    ):
        raise ConfigError(f"{str(path)!r} is not a rollout of slime: it has no rollout_id and list of samples")
    return {**dump, "path": str(path)}


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
        sample, "response_length", lambda it: type(it) is int and 0 < it < len(token_ids), "less than all tokens", where
    )
    completion = token_ids[-num_tokens:]
    mask = sample.get("loss_mask")
    if mask is None or not any(mask):
        mask = [1] * num_tokens
    if len(mask) != num_tokens:
        raise ConfigError(f"{where}: loss_mask has {len(mask)} entries for {num_tokens} tokens")
    if sample.get("multimodal_inputs"):
        raise ConfigError(f"{where} has images, which slime does not store in a form that can be read back")
    if sample.get("remove_sample"):
        found.assumed["slime left a sample out of the loss (remove_sample); here it is trained on"] += 1
    logprobs = sample.get("rollout_log_probs")
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
    versions = [it for it in map(_version, sample.get("weight_versions", ())) if it is not None]
    if not versions:
        found.assumed["no weight version is stored: taken for that of the step"] += 1
        return version
    if len({*versions}) > 1:
        found.assumed["several versions sampled it, and where they changed is not stored: taken for the oldest"] += 1
    if (at := min(versions) - oldest) > version:
        found.assumed["it is newer than the step by its number: taken for that of the step"] += 1
    return min(at, version)


def _version(text: Any) -> int | None:
    return int(text) if str(text).isdigit() else None


def _reward_of(sample: Mapping[str, Any], key: str | None, where: str) -> float:
    reward = sample.get("reward")
    if isinstance(reward, dict):
        if key is None:
            raise ConfigError(f"{where}: its reward has several values, {sorted(reward)}: choose one with --reward-key")
        reward = reward.get(key)
    if not is_number(reward):
        raise ConfigError(f"{where}: reward is {str(reward)[:80]!r}, not a number")
    return float(reward)  # type: ignore[arg-type]


def _stretches(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Return where runs of ones begin and end."""
    borders = [i for i in range(len(mask) + 1) if bool(i and mask[i - 1]) != bool(i < len(mask) and mask[i])]
    return list(zip(borders[::2], borders[1::2], strict=True))
