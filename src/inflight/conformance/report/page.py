"""The certificate as one HTML page that needs no other files, scripts or network access. All content is escaped."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from inflight.base.printable import printable
from inflight.conformance.report.summary import (
    by_level,
    caveats,
    duration,
    headline,
    slowest,
    time_spent,
    title,
    total_seconds,
)
from inflight.conformance.report.text import fact_lines, fact_text
from inflight.conformance.verdicts import BAD_OUTCOMES, Certificate, CheckOutcome, Verdict


def html_page(certificate: Certificate) -> str:
    """Return the certificate as a page in which the checks that prevent conformance are expanded."""
    style = resources.files("inflight.conformance.report").joinpath("page.css").read_text(encoding="utf-8")
    sections = [_level(level, verdicts) for level, verdicts in by_level(certificate).items()]
    body = "\n".join([_header(certificate), *sections, _time(certificate), _circumstances(certificate)])
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_escaped(title(certificate))}: inflight contract</title>
<style>
{style}</style>
</head>
<body>
<main>
{body}
<footer>Written by inflight check {_escaped(certificate.kit_version)}</footer>
</main>
</body>
</html>
"""


def _header(certificate: Certificate) -> str:
    badges = "".join(
        f'<span class="badge {_class(outcome)}">{num_verdicts} {outcome}</span>'
        for outcome, num_verdicts in certificate.counts.items()
    )
    notes = "".join(f'<p class="caveat">{_escaped(caveat)}</p>\n' for caveat in caveats(certificate))
    return f"""<header{"" if certificate.conforms else ' class="bad"'}>
<h1>{_escaped(certificate.implementation)} <small>{_escaped(certificate.implementation_version)}</small></h1>
<p class="headline">This {certificate.kind} {_escaped(headline(certificate))}.</p>
{notes}<p class="muted">{_escaped(certificate.target)} · protocol version {certificate.protocol_version} ·
<time datetime="{_escaped(certificate.started_at)}">{_escaped(certificate.started_at)}</time> ·
{duration(certificate.seconds)}</p>
<div class="badges">{badges}</div>
</header>"""


def _level(level: str, verdicts: Sequence[Verdict]) -> str:
    num_passed = sum(verdict.outcome is CheckOutcome.PASSED for verdict in verdicts)
    rows = "\n".join(_check(verdict) for verdict in verdicts)
    return f"""<section>
<h2>{_escaped(level)} <span>{num_passed} of {len(verdicts)} passed · {duration(total_seconds(verdicts))}</span></h2>
{rows}
</section>"""


def _check(verdict: Verdict) -> str:
    why = verdict.expected or verdict.message
    note = f'<span class="why">{_escaped(why)}</span>' if why else ""
    row = (
        f"<code>{_escaped(verdict.id)}</code><span>{_escaped(verdict.requirement)}{note}</span>"
        f'<span class="badge {_class(verdict.outcome)}">{verdict.outcome}</span>'
        f"<time>{duration(verdict.seconds)}</time>"
    )
    details = _details(verdict)
    if not details:
        return f'<div class="check row">{row}</div>'
    is_open = " open" if verdict.outcome in BAD_OUTCOMES else ""
    return f'<details class="check"{is_open}><summary class="row">{row}</summary>\n<dl>{details}</dl></details>'


def _details(verdict: Verdict) -> str:
    """Return the collapsible details of a check, or an empty string if there are none."""
    terms = []
    if verdict.expected and verdict.message:
        terms.append(("seen", _escaped(verdict.message)))
    if verdict.look_at:
        terms.append(("look at", _escaped(verdict.look_at)))
    if verdict.evidence:
        lines = "\n".join(html.escape(line) for line in fact_lines(verdict.evidence))
        terms.append(("measured", f"<pre>{lines}</pre>"))
    if verdict.stacks:
        terms.append(("stacks", f"<pre>{_escaped(verdict.stacks)}</pre>"))
    return "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in terms)


def _time(certificate: Certificate) -> str:
    spent = time_spent(certificate)
    longest = max((seconds for _, seconds in spent), default=0.0) or 1.0
    bars = "\n".join(
        f'<div class="bar"><span>{_escaped(name)}</span><i style="width: {100 * seconds / longest:.1f}%"></i>'
        f"<time>{duration(seconds)}</time></div>"
        for name, seconds in spent
    )
    slow = ", ".join(f"{_escaped(verdict.id)} {duration(verdict.seconds)}" for verdict in slowest(certificate))
    return f"""<section>
<h2>Where the time went <span>{duration(certificate.seconds)}</span></h2>
{bars}
<p class="muted">{f"Slowest: {slow}" if slow else ""}</p>
</section>"""


def _circumstances(certificate: Certificate) -> str:
    tables: Mapping[str, Mapping[str, Any]] = {
        "flags": certificate.flags,
        "environment": certificate.environment,
        "capabilities": certificate.capabilities,
    }
    folded = "\n".join(
        f"<details><summary>{name}</summary>\n<dl>{_terms(facts)}</dl></details>"
        for name, facts in tables.items()
        if facts
    )
    return f"<section>\n<h2>How and where it was checked</h2>\n{folded}\n</section>" if folded else ""


def _terms(facts: Mapping[str, Any]) -> str:
    return "".join(f"<dt>{_escaped(key)}</dt><dd>{_escaped(fact_text(value))}</dd>" for key, value in facts.items())


def _class(outcome: CheckOutcome) -> str:
    return outcome.replace(" ", "-")


def _escaped(text: str) -> str:
    return html.escape(printable(text))
