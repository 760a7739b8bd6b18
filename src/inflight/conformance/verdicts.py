"""Verdicts of single checks, and the certificate that holds those of a whole run: what is kept, shown and compared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from inflight.conformance.checks import Kind
from inflight.wire import CONTRACT_EDITION


class Outcome(StrEnum):
    """What a check came to."""

    PASSED = "passed"
    FAILED = "failed"
    HUNG = "hung"
    """It did not end before its deadline; the verdict carries the stacks."""
    SKIPPED = "skipped"
    """Not declared, or the kit was not given what the check needs."""
    EXPECTED_FAILURE = "expected failure"
    """It failed or hung, and a file of expected failures says why."""
    UNEXPECTED_PASS = "unexpected pass"
    """It passed although a file of expected failures says that it does not."""


BAD_OUTCOMES = frozenset({Outcome.FAILED, Outcome.HUNG, Outcome.UNEXPECTED_PASS})
"""What makes a run of the kit end with status 1."""


class Verdict(BaseModel):
    """What one check came to, with its evidence."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    level: str
    sentence: str
    outcome: Outcome
    seconds: float = Field(ge=0)
    message: str = ""
    """What was seen instead of what the sentence says, or why the check was skipped. Empty if it passed."""
    evidence: dict[str, Any] = {}
    """What was measured, by name; numbers, strings, and lists and dictionaries of them."""
    look_at: str = ""
    """Where to look first; empty if it passed or was skipped."""
    stacks: str = ""
    """Where every thread, task and rank was when a check hung."""
    expected: str = ""
    """The reason that the file of expected failures gives."""

    def raise_unless_good(self) -> None:
        """Raise ``AssertionError`` with everything that is known if the check failed or hung."""
        if self.outcome in BAD_OUTCOMES:
            lines = [f"{self.id} {self.outcome}: {self.sentence}", self.message, f"evidence: {self.evidence}"]
            raise AssertionError("\n".join([*lines, f"look at: {self.look_at}", self.stacks]).rstrip())


class Certificate(BaseModel):
    """One run of the kit over one implementation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    edition: int = CONTRACT_EDITION
    kit_version: str
    kind: Kind
    target: str
    """What was checked, as given on the command line; without any token."""
    implementation: str
    """Name of the engine, trainer or transport, as far as it says."""
    implementation_version: str = ""
    flags: dict[str, str] = {}
    """Options that were given for it, the model and the number of ranks among them."""
    environment: dict[str, str] = {}
    """Versions and machine, see `environment`."""
    sources: str = ""
    """Digest of the sources that were checked, see `inflight.conformance.sources`; empty if they are not known."""
    capabilities: dict[str, Any] = {}
    """What an endpoint declared, empty elsewhere."""
    started_at: str
    """ISO 8601, UTC."""
    seconds: float = Field(ge=0)
    start_seconds: float = Field(default=0.0, ge=0)
    """Part of ``seconds``: starting processes, loading models, bringing the subject back between checks."""
    problem: str = ""
    """Why the run ended before its last check; empty if it did not."""
    left_out: tuple[str, ...] = ()
    """Ids of the checks of this kind that were not asked for."""
    verdicts: tuple[Verdict, ...]

    @property
    def counts(self) -> dict[Outcome, int]:
        """Number of verdicts per outcome, those that occur."""
        found = Counter(verdict.outcome for verdict in self.verdicts)
        return {outcome: found[outcome] for outcome in Outcome if found[outcome]}

    @property
    def conforms(self) -> bool:
        """True if nothing failed, hung or passed against expectation, something passed, and the run came to its end."""
        counts = self.counts
        return not self.problem and not BAD_OUTCOMES & counts.keys() and Outcome.PASSED in counts


def merged(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict of all ranks: the worst of them, which says which rank it is of."""
    order = (Outcome.HUNG, Outcome.FAILED, Outcome.SKIPPED, Outcome.PASSED)
    worst = min(range(len(verdicts)), key=lambda rank: order.index(verdicts[rank].outcome))
    verdict = verdicts[worst]
    if len(verdicts) == 1:
        return verdict
    evidence = {key: value for v in reversed(verdicts) for key, value in v.evidence.items()}
    stacks = "\n".join(f"--- rank {rank}\n{v.stacks}" for rank, v in enumerate(verdicts) if v.stacks)
    message = f"rank {worst}: {verdict.message}" if verdict.message else ""
    seconds = max(v.seconds for v in verdicts)
    return verdict.model_copy(update={"message": message, "evidence": evidence, "stacks": stacks, "seconds": seconds})


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return versions of Python, torch and transformers, and what machine this is."""
    import os
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "platform": platform.platform(), "cpus": str(os.cpu_count())}
    for package in ("torch", "transformers", "vllm", "sglang", "torchtitan"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return {**found, **(extra or {})}


def plain(value: Any) -> Any:
    """Return evidence as JSON can hold it: numbers that are not finite become words, long texts are cut."""
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
