"""Verdicts on single checks, and the certificate of a whole run, which can be kept, displayed and compared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from pydantic import Field

from inflight.conformance.checks import Kind
from inflight.wire import PROTOCOL_VERSION, WireModel


class CheckOutcome(StrEnum):
    """The outcome of a check."""

    PASSED = "passed"
    FAILED = "failed"
    HUNG = "hung"
    """The check did not end before its deadline; the verdict contains the stacks."""
    SKIPPED = "skipped"
    """The subject does not support a feature that the check needs, or the user did not provide it."""
    EXPECTED_FAILURE = "expected failure"
    """The check failed or hung, and a file of expected failures states why."""
    UNEXPECTED_PASS = "unexpected pass"
    """The check passed although a file of expected failures lists it."""


BAD_OUTCOMES = frozenset({CheckOutcome.FAILED, CheckOutcome.HUNG, CheckOutcome.UNEXPECTED_PASS})
"""A run with any of these outcomes ends with status 1."""


class Verdict(WireModel):
    """The outcome of one check, with its evidence."""

    id: str
    level: str
    requirement: str
    outcome: CheckOutcome
    seconds: float = Field(ge=0)
    message: str = ""
    """How the requirement was violated, or why the check was skipped; empty if the check passed."""
    evidence: dict[str, Any] = Field(default_factory=dict)
    """Measurements by name: numbers, strings, and lists and dictionaries of them."""
    look_at: str = ""
    """Where to look first; empty if it passed or was skipped."""
    stacks: str = ""
    """Where every thread, task and rank was when a check hung."""
    expected: str = ""
    """The reason that the file of expected failures gives."""

    def raise_unless_good(self) -> None:
        """Raise ``AssertionError`` with all known details unless the outcome is good."""
        if self.outcome in BAD_OUTCOMES:
            lines = [f"{self.id} {self.outcome}: {self.requirement}", self.message, f"evidence: {self.evidence}"]
            raise AssertionError("\n".join([*lines, f"look at: {self.look_at}", self.stacks]).rstrip())


class Certificate(WireModel):
    """The results of one run of the kit on one implementation."""

    protocol_version: int = PROTOCOL_VERSION
    kit_version: str
    kind: Kind
    target: str
    """What was checked, as given on the command line, without any token."""
    implementation: str
    """The name that the engine, trainer or transport reports."""
    implementation_version: str = ""
    flags: dict[str, str] = Field(default_factory=dict)
    """The options of the run, including the model and the number of ranks."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Versions and the machine; see `environment`."""
    sources: str = ""
    """Digest of the checked sources (see `inflight.conformance.sources`); empty if they are unknown."""
    capabilities: dict[str, Any] = Field(default_factory=dict)
    """What an endpoint reported; empty for other kinds."""
    tolerance: float | None = None
    """For endpoints, the maximum difference between logprobs that counted as equal."""
    slowness: float = Field(default=1.0, ge=1)
    """Factor by which the time limits of checks were extended because of an endpoint's measured pace."""
    started_at: str
    """ISO 8601, UTC."""
    seconds: float = Field(ge=0)
    start_seconds: float = Field(default=0.0, ge=0)
    """The part of ``seconds`` spent on starting processes, loading models, and restoring the subject."""
    problem: str = ""
    """Why the certificate is not valid: the run ended before its last check, or the sources changed during the run.

    Empty if the certificate is valid.
    """
    left_out: tuple[str, ...] = ()
    """Ids of the checks of this kind that were not requested."""
    verdicts: tuple[Verdict, ...]

    @property
    def counts(self) -> dict[CheckOutcome, int]:
        """Number of verdicts per outcome, for outcomes that occur."""
        found = Counter(verdict.outcome for verdict in self.verdicts)
        return {outcome: found[outcome] for outcome in CheckOutcome if found[outcome]}

    @property
    def conforms(self) -> bool:
        """Whether the certificate has no problem, a check passed, and none failed, hung or passed unexpectedly."""
        counts = self.counts
        return not self.problem and not BAD_OUTCOMES & counts.keys() and CheckOutcome.PASSED in counts


def merged(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the worst of all ranks' verdicts; its message names the rank.

    If some ranks hang because another rank raised an error, the message begins with that error.
    """
    order = (CheckOutcome.HUNG, CheckOutcome.FAILED, CheckOutcome.SKIPPED, CheckOutcome.PASSED)
    worst = min(range(len(verdicts)), key=lambda rank: order.index(verdicts[rank].outcome))
    verdict = verdicts[worst]
    if len(verdicts) == 1:
        return verdict
    evidence = {key: value for v in reversed(verdicts) for key, value in v.evidence.items()}
    stacks = "\n".join(f"--- rank {rank}\n{v.stacks}" for rank, v in enumerate(verdicts) if v.stacks)
    message = f"rank {worst}: {verdict.message}" if verdict.message else ""
    if verdict.outcome is CheckOutcome.HUNG:
        raised = [f"rank {rank}: {v.message}" for rank, v in enumerate(verdicts) if v.outcome is CheckOutcome.FAILED]
        hung = [str(rank) for rank, v in enumerate(verdicts) if v.outcome is CheckOutcome.HUNG]
        if raised:
            message = f"{'; '.join(raised)}; rank {', '.join(hung)} hung while waiting for it"
    seconds = max(v.seconds for v in verdicts)
    return verdict.model_copy(update={"message": message, "evidence": evidence, "stacks": stacks, "seconds": seconds})


def environment() -> dict[str, str]:
    """Return the versions of Python and of the relevant packages, and a description of the machine."""
    import os
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "platform": platform.platform(), "cpus": str(os.cpu_count())}
    for package in ("torch", "transformers", "vllm", "sglang", "torchtitan", "deepspeed", "megatron-core"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def plain(value: Any) -> Any:
    """Return evidence as JSON-compatible values: non-finite numbers become strings, and long texts are truncated."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int):
        return value
    return str(value)[:2000]
