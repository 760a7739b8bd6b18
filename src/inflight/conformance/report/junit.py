"""The certificate as JUnit XML for build servers.

There is one ``testsuite`` per level and one ``testcase`` per check. A hung check is an ``error``, an expected failure
is ``skipped`` with its reason, an unexpected pass is a ``failure``, and a certificate that is not valid has an
additional ``error`` with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

from inflight.base.printable import printable
from inflight.conformance.report.summary import by_level, title, total_seconds
from inflight.conformance.report.text import fact_lines
from inflight.conformance.verdicts import Certificate, CheckOutcome, Verdict

_ELEMENTS = {
    CheckOutcome.FAILED: "failure",
    CheckOutcome.UNEXPECTED_PASS: "failure",
    CheckOutcome.HUNG: "error",
    CheckOutcome.SKIPPED: "skipped",
    CheckOutcome.EXPECTED_FAILURE: "skipped",
}


def junit_xml(certificate: Certificate) -> str:
    """Return the certificate as JUnit XML."""
    root = ElementTree.Element(
        "testsuites", name=printable(f"{title(certificate)}, protocol version {certificate.protocol_version}")
    )
    for level, verdicts in by_level(certificate).items():
        suite = _suite(root, level, certificate, verdicts)
        for verdict in verdicts:
            _case(suite, verdict, f"inflight.{certificate.kind}.{level}")
    if certificate.problem:
        suite = _suite(root, "run", certificate, ())
        suite.attrib |= {"tests": "1", "errors": "1"}
        case = ElementTree.SubElement(suite, "testcase", classname="inflight.run", name="the run finished")
        ElementTree.SubElement(case, "error", message=printable(certificate.problem))
    for count in ("tests", "failures", "errors", "skipped"):
        root.set(count, str(sum(int(suite.attrib[count]) for suite in root)))
    root.set("time", f"{certificate.seconds:.3f}")
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _suite(
    root: ElementTree.Element, name: str, certificate: Certificate, verdicts: Sequence[Verdict]
) -> ElementTree.Element:
    elements = [_ELEMENTS.get(verdict.outcome) for verdict in verdicts]
    suite = ElementTree.SubElement(
        root,
        "testsuite",
        name=printable(name),
        tests=str(len(verdicts)),
        failures=str(elements.count("failure")),
        errors=str(elements.count("error")),
        skipped=str(elements.count("skipped")),
        time=f"{total_seconds(verdicts):.3f}",
        timestamp=certificate.started_at,
    )
    properties = ElementTree.SubElement(suite, "properties")
    facts: Mapping[str, str] = {
        "target": certificate.target,
        "kit_version": certificate.kit_version,
        **certificate.flags,
        **certificate.environment,
    }
    for key, value in facts.items():
        ElementTree.SubElement(properties, "property", name=printable(key), value=printable(value))
    return suite


def _case(suite: ElementTree.Element, verdict: Verdict, classname: str) -> None:
    name = printable(f"{verdict.id} {verdict.requirement}")
    case = ElementTree.SubElement(
        suite, "testcase", classname=printable(classname), name=name, time=f"{verdict.seconds:.3f}"
    )
    if verdict.outcome in _ELEMENTS:
        is_expected = verdict.outcome is CheckOutcome.EXPECTED_FAILURE
        message = f"expected failure: {verdict.expected}" if is_expected else verdict.message
        element = ElementTree.SubElement(case, _ELEMENTS[verdict.outcome], message=printable(message))
        element.text = printable(_details(verdict)) or None
    if verdict.evidence:
        ElementTree.SubElement(case, "system-out").text = "\n".join(fact_lines(verdict.evidence))


def _details(verdict: Verdict) -> str:
    """Return the details that the message leaves out."""
    is_expected = verdict.outcome is CheckOutcome.EXPECTED_FAILURE
    lines = [verdict.message] if is_expected else []
    if verdict.outcome is CheckOutcome.UNEXPECTED_PASS:
        lines.append(f"the reason given for a failure: {verdict.expected}")
    if verdict.look_at:
        lines.append(f"look at: {verdict.look_at}")
    return "\n".join([*lines, *([verdict.stacks] if verdict.stacks else [])])
