"""Runs checks on one target and creates the certificate, which contains neither tokens nor passwords."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from inflight import __version__
from inflight.conformance.checks import Check
from inflight.conformance.child import checks_of
from inflight.conformance.expected import apply_expected
from inflight.conformance.kit import Kit
from inflight.conformance.sources import digest
from inflight.conformance.targets import EndpointTarget, Target
from inflight.conformance.verdicts import Certificate, Verdict, environment
from inflight.errors import ConfigError

if TYPE_CHECKING:
    from inflight.conformance.worker.torchrun import TorchrunKit

_SECRET_OPTION = re.compile(r"(.*_)?(token|key|password|secret)")
_NONE_EXPECTED: Mapping[str, str] = {}


def run_suite(
    kit: Kit | TorchrunKit,
    checks: Sequence[Check],
    *,
    expected: Mapping[str, str] = _NONE_EXPECTED,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
) -> Certificate:
    """Return the certificate of these checks, run in order; ``on_verdict`` receives each verdict as it arrives.

    Raises `ConfigError` if the subject cannot be created. If an endpoint becomes unavailable, the verdict on the check
    that caused this reports it, and the other checks are skipped. If a worker or a transport cannot be created again
    after some checks, or if a check hangs under torchrun, the certificate contains the verdicts so far and states the
    reason in ``problem``. If the sources change while the checks run, ``problem`` reports that.
    """
    started_at, started = datetime.now(UTC), time.monotonic()
    target, facts = kit.target, kit.facts
    said = _redacted({**facts, "target": _label(target)}, _secrets(target))
    said["implementation"] = said.get("implementation") or said["target"]
    sources = digest(target.kind, said["target"], said["implementation"])
    verdicts: list[Verdict] = []
    roots: dict[str, str] = {}
    problem = ""
    for check in checks:
        try:
            verdict = kit.run(check)
        except ConfigError as error:
            if not verdicts:
                raise
            problem = f"the run ended before {check}: {error}"
            break
        verdicts.append(_settled(verdict, target, expected))
        on_verdict(verdicts[-1])
        if kit.gone is not None and kit.gone.since != verdict.id:
            roots[kit.gone.since] = kit.gone.why
        if kit.is_over and check is not checks[-1]:
            problem = f"the run ended after {check.id}, which hung"
            break
    asked = {check.id for check in checks}
    if not problem and digest(target.kind, said["target"], said["implementation"]) != sources:
        problem = "the sources of the implementation or of the kit changed while the checks ran; run the checks again"
    return Certificate(
        kit_version=__version__,
        kind=target.kind,
        environment=environment(),
        sources=sources,
        started_at=started_at.isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - started, 3),
        start_seconds=round(kit.start_seconds, 3),
        left_out=tuple(check.id for check in checks_of(target.kind) if check.id not in asked),
        verdicts=tuple(_as_root(verdict, target, roots.get(verdict.id)) for verdict in verdicts),
        problem=_redacted(problem, _secrets(target)),
        **said,
    )


def _as_root(verdict: Verdict, target: Target, why: str | None) -> Verdict:
    """Return the verdict. If ``why`` is given, note that the target was unavailable afterwards and checks were
    skipped."""
    if why is None:
        return verdict
    words = "this is the failure that matters: the checks that follow were skipped"
    if why not in verdict.message:
        words += f" because the {target.kind} was unavailable after it: {_redacted(why, _secrets(target))}"
    return verdict.model_copy(update={"message": f"{verdict.message}\n{words}"})


def _settled(verdict: Verdict, target: Target, expected: Mapping[str, str]) -> Verdict:
    """Return the verdict without secrets and with expected failures taken into account."""
    secrets = _secrets(target)
    fields = {name: _redacted(getattr(verdict, name), secrets) for name in ("message", "evidence", "stacks")}
    return apply_expected(verdict.model_copy(update=fields), expected)


def _label(target: Target) -> str:
    """Return the target's name for the certificate; a URL loses its user and password."""
    if not isinstance(target, EndpointTarget) or target.url is None:
        return target.label
    parts = urlsplit(target.url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _secrets(target: Target) -> tuple[str, ...]:
    """Return the token, the URL's password, and the options whose names suggest a secret, longest first."""
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
