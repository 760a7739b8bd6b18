"""The report of a replay, as text and as JSON values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from inflight.base.text_tables import align_columns
from inflight.replay.differences import ROUNDING, StepDifference
from inflight.replay.sampling import Resampled, SamplingReplay, Scored
from inflight.replay.training import Replayed

_NUM_SHOWN = 8
"""Maximum number of diverging completions for which the report has a row."""


def as_json(replayed: Replayed) -> dict[str, Any]:
    """Return the whole report as JSON values."""
    return {
        "trainer": replayed.trainer,
        "num_ranks": replayed.num_ranks,
        "recorded_trainer": replayed.recorded_trainer,
        "recorded_ranks": replayed.recorded_ranks,
        "is_bit_equal": replayed.is_bit_equal,
        "first_unequal": first_unequal(replayed),
        "first_beyond_rounding": first_beyond_rounding(replayed),
        "final_sha256": replayed.final.sha256,
        "recorded_final_sha256": None if replayed.recorded_final is None else replayed.recorded_final.sha256,
        "weights": None if replayed.weights is None else asdict(replayed.weights),
        "steps": [
            {
                "version": step.version,
                "gradient_norm": step.gradient_norm,
                "recorded_gradient_norm": step.recorded_gradient_norm,
                "gradient_norm_difference": step.gradient_norm_difference,
                "figures": {name: list(pair) for name, pair in step.figures.items()},
                "logprobs": None if step.logprobs is None else asdict(step.logprobs),
            }
            for step in replayed.steps
        ],
    }


def first_unequal(replayed: Replayed) -> int | None:
    """Return the version of the first step that is not bit-equal."""
    return next((step.version for step in replayed.steps if not step.is_bit_equal), None)


def first_beyond_rounding(replayed: Replayed) -> int | None:
    """Return the version of the first step that differs by more than `ROUNDING` explains."""
    rounding = ROUNDING[replayed.dtype]
    return next((step.version for step in replayed.steps if step.exceeds(rounding)), None)


def described(replayed: Replayed) -> str:
    """Return the report as text."""
    number = len(replayed.steps)
    what = f"{number} step{'s' * (number != 1)} on {replayed.trainer} with {_ranks(replayed.num_ranks)}"
    if replayed.recorded_trainer is not None and replayed.recorded_ranks is not None:
        what += f"; recorded on {replayed.recorded_trainer} with {_ranks(replayed.recorded_ranks)}"
    lines = [what]
    if all(step.recorded_gradient_norm is None for step in replayed.steps):
        return "\n".join([*lines, "the record has no outcomes of its steps, so it cannot be compared with the replay"])
    if replayed.is_bit_equal:
        final = (
            f"the final weights have SHA-256 {replayed.final.sha256}"
            if replayed.recorded_final is not None
            else "final weights were not compared: the run has not ended, or the replay ended before it"
        )
        return "\n".join([*lines, "bit-equal: every metric, gradient norm and trainer logprob of every step", final])
    return "\n".join([*lines, *_first_difference(replayed), "", _table(replayed.steps), *_of_weights(replayed)])


def _first_difference(replayed: Replayed) -> list[str]:
    if (version := first_unequal(replayed)) is None:
        return ["every step is bit-equal, but the final weights are not"]
    step = next(step for step in replayed.steps if step.version == version)
    first = f"first difference: the step to version {version}"
    if version == 1:
        first += ", which starts from the same weights: the two trainers compute the same numbers differently"
    else:
        first += ", after bit-equal steps"
    lines = [first, f"  by {_what(step)}"]
    beyond, rounding = first_beyond_rounding(replayed), ROUNDING[replayed.dtype]
    if beyond is None:
        return [*lines, f"no step differs by more than rounding in {replayed.dtype} can explain ({rounding:g})"]
    step = next(step for step in replayed.steps if step.version == beyond)
    lines.append(f"first difference beyond rounding in {replayed.dtype} ({rounding:g}): the step to version {beyond}")
    return [*lines, f"  by {_what(step)}"]


def _what(step: StepDifference) -> str:
    parts = []
    if step.gradient_norm_difference:
        parts.append(
            f"gradient norm {step.recorded_gradient_norm:.9g} -> {step.gradient_norm:.9g} "
            f"({step.gradient_norm_difference:.2g} relative)"
        )
    if step.logprobs is not None and step.logprobs.largest:
        parts.append(
            f"trainer logprobs by {step.logprobs.mean:.2g} on average and {step.logprobs.largest:.2g} at most "
            f"({step.logprobs.num_equal} of {step.logprobs.num_targets} are equal)"
        )
    others = [name for name in step.unequal if name != "gradient_norm"]
    if others:
        parts.append(f"{len(others)} metrics, such as {', '.join(others[:4])}")
    return "; ".join(parts)


def _table(steps: Sequence[StepDifference]) -> str:
    """Return a table of the differences of steps 1, 2, 4, 8 and so on, and of the last step."""
    shown = {2**power for power in range(len(steps).bit_length())} | {len(steps)}
    rows = [("version", "gradient norm", "logprobs, mean", "logprobs, largest", "metrics that differ")]
    for number, step in enumerate(steps, 1):
        if number in shown:
            norm, logprobs = step.gradient_norm_difference, step.logprobs
            rows.append(
                (
                    str(step.version),
                    "-" if norm is None else f"{norm:.1e}",
                    "-" if logprobs is None else f"{logprobs.mean:.1e}",
                    "-" if logprobs is None else f"{logprobs.largest:.1e}",
                    str(len(step.unequal)),
                )
            )
    return align_columns(rows)


def _of_weights(replayed: Replayed) -> list[str]:
    if replayed.recorded_final is not None and replayed.recorded_final.sha256 == replayed.final.sha256:
        return ["", f"final weights: equal, with SHA-256 {replayed.final.sha256}"]
    if replayed.weights is None:
        return []
    return [
        "",
        f"final weights: the norm of their difference is {replayed.weights.relative:.2g} times the norm of "
        f"the change that training made; no element differs by more than {replayed.weights.largest:.2g}",
    ]


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number != 1)}"


def described_sampling(found: SamplingReplay, tolerance: float, decode: Callable[[Sequence[int]], str]) -> str:
    """Return the report of repeated sampling as text; ``decode`` converts tokens to text."""
    parts = [_described_scores(found.scored, tolerance)] if found.scored else []
    parts += [_described_samples(found.sampled, tolerance, decode)] if found.sampled else []
    return "\n".join(parts)


def _described_scores(found: Sequence[Scored], tolerance: float) -> str:
    differing = [it for it in found if it.differs_at is not None]
    largest, num_tokens = max(it.largest_difference for it in found), sum(it.num_tokens for it in found)
    text = f"{len(found)} completions scored: logprobs of their {num_tokens} tokens differ by at most {largest:.2g}"
    if differing:
        first = min(differing, key=lambda it: it.differs_at or 0)
        text += (
            f"\n{len(differing)} completions have a logprob that differs by more than {tolerance:g}; the first is "
            f"token {first.differs_at} of completion {first.number} of item {first.item}"
        )
    if len(differing) > len(found) / 2:
        text += "\nmost of them differ: check that the server has the weights of --version"
    return text


def _described_samples(found: Sequence[Resampled], tolerance: float, decode: Callable[[Sequence[int]], str]) -> str:
    parted = [it for it in found if it.parts_at is not None]
    largest = max(it.largest_difference for it in found)
    num_tokens = sum(it.num_tokens if it.parts_at is None else it.parts_at for it in found)
    lines = [
        f"{len(found)} completions sampled again: {len(found) - len(parted)} have the recorded tokens, "
        f"{len(parted)} diverge from them",
        f"logprobs of the {num_tokens} common tokens differ by at most {largest:.2g}",
    ]
    by_logprob = [it for it in found if it.parts_by_logprob_at is not None]
    if by_logprob:
        lines.append(f"{len(by_logprob)} completions have a logprob that differs by more than {tolerance:g}")
    if parted:
        rows = [("item", "completion", "parts at", "of", "recorded", "logprob", "now", "logprob")]
        for it in sorted(parted, key=lambda it: it.parts_at or 0)[:_NUM_SHOWN]:
            recorded, now = (_token(token, decode) for token in (it.recorded_token, it.token))
            first, second = ("-" if value is None else f"{value:.3f}" for value in (it.recorded_logprob, it.logprob))
            rows.append(
                (str(it.item), str(it.number), str(it.parts_at), str(it.num_tokens), recorded, first, now, second)
            )
        lines += ["", align_columns(rows)]
    return "\n".join(lines)


def _token(token: int | None, decode: Callable[[Sequence[int]], str]) -> str:
    return "end" if token is None else f"{token} {decode([token])!r}"
