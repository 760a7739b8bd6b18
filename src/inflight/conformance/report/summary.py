"""The texts that all reports share: the headline, the counts, and where the time went."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.conformance.verdicts import Certificate, CheckOutcome, Verdict


def title(certificate: Certificate) -> str:
    """Return the name, version and kind of what was checked."""
    name = f"{certificate.implementation} {certificate.implementation_version}".strip()
    return f"{name}, {certificate.kind}"


def headline(certificate: Certificate) -> str:
    """Return in one sentence whether the implementation conforms, and to which protocol version."""
    verb = "conforms" if certificate.conforms else "does not conform"
    if certificate.conforms and certificate.left_out:
        verb = "conforms, as far as it was checked,"
    return f"{verb} to protocol version {certificate.protocol_version}: {score(certificate)} checks hold"


def score(certificate: Certificate) -> str:
    """Return how many of the checks that apply to this implementation hold, such as ``62 of 64``."""
    counts = certificate.counts
    num_holding = counts.get(CheckOutcome.PASSED, 0) + counts.get(CheckOutcome.UNEXPECTED_PASS, 0)
    return f"{num_holding} of {len(certificate.verdicts) - counts.get(CheckOutcome.SKIPPED, 0)}"


def caveats(certificate: Certificate) -> list[str]:
    """Return the caveats that a reader of the headline must know."""
    found = []
    if certificate.problem:
        found.append(f"The certificate is not valid: {certificate.problem}")
    if certificate.left_out:
        num_checks = len(certificate.left_out)
        found.append(f"{num_checks} check{'s were' if num_checks > 1 else ' was'} left out of this run.")
    return found


def by_level(certificate: Certificate) -> dict[str, list[Verdict]]:
    """Return the verdicts of every level, in the order of the run."""
    levels: dict[str, list[Verdict]] = {}
    for verdict in certificate.verdicts:
        levels.setdefault(verdict.level, []).append(verdict)
    return levels


def time_spent(certificate: Certificate) -> list[tuple[str, float]]:
    """Return the seconds spent on each level, on starting and restoring, and on everything else.

    They add up to the total.
    """
    spent = [(level, total_seconds(verdicts)) for level, verdicts in by_level(certificate).items()]
    spent.append(("starting and restoring", certificate.start_seconds))
    rest = certificate.seconds - sum(seconds for _, seconds in spent)
    return [*spent, ("everything else", max(0.0, rest))]


def total_seconds(verdicts: Sequence[Verdict]) -> float:
    """Return the seconds that these checks took."""
    return sum(verdict.seconds for verdict in verdicts)


def slowest(certificate: Certificate, num_checks: int = 5) -> list[Verdict]:
    """Return the checks that took longest, longest first, excluding those that took no time."""
    timed = [verdict for verdict in certificate.verdicts if verdict.seconds > 0]
    return sorted(timed, key=lambda verdict: verdict.seconds, reverse=True)[:num_checks]


def duration(seconds: float) -> str:
    """Return a human-readable duration."""
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"
