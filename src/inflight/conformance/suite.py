"""Runs a list of checks over one target and makes the certificate, which holds no token and no password."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from inflight import __version__
from inflight.conformance.checks import Check
from inflight.conformance.child import checks_of
from inflight.conformance.expected import apply_expected
from inflight.conformance.kit import Kit
from inflight.conformance.sources import digest
from inflight.conformance.targets import EndpointTarget, Target, WorkerTarget
from inflight.conformance.verdicts import Certificate, Verdict, environment
from inflight.errors import ConfigError

_SECRET_OPTION = re.compile(r"(.*_)?(token|key|password|secret)")
_NONE_EXPECTED: Mapping[str, str] = {}


def run_suite(
    kit: Kit,
    checks: Sequence[Check],
    *,
    expected: Mapping[str, str] = _NONE_EXPECTED,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
) -> Certificate:
    """Return the certificate of these checks, run in order; ``on_verdict`` gets each verdict as it comes.

    Raises `ConfigError` if the subject cannot be made. An endpoint that goes away is marked at the check that did it,
    and the others are skipped. If a worker or a transport cannot be made again after some checks, the certificate holds
    the verdicts until then and says so in ``problem``.
    """
    started_at, started = datetime.now(UTC), time.monotonic()
    facts = kit.facts
    verdicts: list[Verdict] = []
    roots: dict[str, str] = {}
    problem = ""
    for check in checks:
        try:
            verdict = kit.run(check)
        except ConfigError as error:
            if not verdicts:
                raise
            problem = f"before {check}: {error}"
            break
        verdicts.append(_settled(verdict, kit.target, expected))
        on_verdict(verdicts[-1])
        if kit.gone is not None and kit.gone.since != verdict.id:
            roots[kit.gone.since] = kit.gone.why
    return _certificate(
        kit.target,
        checks,
        [_as_root(verdict, kit.target, roots.get(verdict.id)) for verdict in verdicts],
        facts=facts,
        started_at=started_at,
        seconds=time.monotonic() - started,
        start_seconds=kit.start_seconds,
        problem=problem,
    )


def run_suite_on_this_rank(
    target: WorkerTarget,
    checks: Sequence[Check],
    *,
    expected: Mapping[str, str] = _NONE_EXPECTED,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
) -> Certificate | None:
    """Return on rank 0 the certificate of checks run in this process, one rank of torchrun's; None on the others.

    Nothing can be killed here: a check that hangs is the last one.
    """
    from inflight.conformance.worker.torchrun import run_under_torchrun

    started_at, started = datetime.now(UTC), time.monotonic()
    raw_verdicts = run_under_torchrun(target, checks, lambda verdict: on_verdict(_settled(verdict, target, expected)))
    if raw_verdicts is None:
        return None
    flags = {**{key: str(value) for key, value in target.options.items()}, "ranks": str(target.num_ranks)}
    return _certificate(
        target,
        checks,
        [_settled(verdict, target, expected) for verdict in raw_verdicts],
        facts={"flags": {**flags, "launcher": "torchrun"}},
        started_at=started_at,
        seconds=time.monotonic() - started,
        problem=f"after {raw_verdicts[-1].id}, which hung" if len(raw_verdicts) < len(checks) else "",
    )


def _as_root(verdict: Verdict, target: Target, why: str | None) -> Verdict:
    """Return the verdict, with a mark if checks were skipped since then because the target did not come back."""
    if why is None:
        return verdict
    words = "this is the failure that matters: the checks that follow were skipped"
    if why not in verdict.message:
        words += f", as after it the {target.kind} was gone: {_redacted(why, _secrets(target))}"
    return verdict.model_copy(update={"message": f"{verdict.message}\n{words}"})


def _settled(verdict: Verdict, target: Target, expected: Mapping[str, str]) -> Verdict:
    """Return the verdict as it is shown and kept: without secrets, and as the expected failures make it."""
    secrets = _secrets(target)
    fields = {name: _redacted(getattr(verdict, name), secrets) for name in ("message", "evidence", "stacks")}
    return apply_expected(verdict.model_copy(update=fields), expected)


def _certificate(
    target: Target,
    checks: Sequence[Check],
    verdicts: Sequence[Verdict],
    *,
    facts: Mapping[str, Any],
    started_at: datetime,
    seconds: float,
    start_seconds: float = 0.0,
    problem: str = "",
) -> Certificate:
    """Return the certificate of a run of ``checks`` that came to ``verdicts``. ``facts``: see `judge.Subject`."""
    secrets = _secrets(target)
    asked = {check.id for check in checks}
    label = _redacted(_label(target), secrets)
    implementation = _redacted(facts.get("implementation", ""), secrets) or label
    return Certificate(
        kit_version=__version__,
        kind=target.kind,
        target=label,
        implementation=implementation,
        implementation_version=_redacted(facts.get("implementation_version", ""), secrets),
        flags=_redacted(facts.get("flags", {}), secrets),
        environment=environment(),
        sources=digest(label, implementation),
        capabilities=_redacted(facts.get("capabilities", {}), secrets),
        started_at=started_at.isoformat(timespec="seconds"),
        seconds=round(seconds, 3),
        start_seconds=round(start_seconds, 3),
        problem=_redacted(problem, secrets),
        left_out=tuple(check.id for check in checks_of(target.kind) if check.id not in asked),
        verdicts=tuple(verdicts),
    )


def _label(target: Target) -> str:
    """Return what the certificate calls the target: a URL without user and password."""
    if not isinstance(target, EndpointTarget) or target.url is None:
        return target.label
    parts = urlsplit(target.url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _secrets(target: Target) -> tuple[str, ...]:
    """Return the token, the password of the URL, and the options that are named like one, the longest first."""
    found = {text for name, text in target.options.items() if _SECRET_OPTION.fullmatch(name) and isinstance(text, str)}
    if isinstance(target, EndpointTarget):
        found |= {target.token or "", urlsplit(target.url or "").password or ""}
    return tuple(sorted(found - {""}, key=len, reverse=True))


def _redacted(value: Any, secrets: Sequence[str]) -> Any:
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, "[secret]")
        return value
    if isinstance(value, Mapping):
        return {key: _redacted(item, secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted(item, secrets) for item in value]
    return value
