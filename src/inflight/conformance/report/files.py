"""Writes certificates and reports to files atomically, and reads certificates back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pydantic

from inflight.base.json_files import write_output
from inflight.base.validation import describe_problems
from inflight.conformance.report.junit import junit_xml
from inflight.conformance.report.page import html_page
from inflight.conformance.report.summary import score
from inflight.conformance.verdicts import Certificate, CheckOutcome
from inflight.errors import ConfigError


def certificate_json(certificate: Certificate) -> str:
    """Return the certificate as JSON, which `read_certificate` can read."""
    return certificate.model_dump_json(indent=2) + "\n"


def badge_json(certificate: Certificate) -> str:
    """Return the badge as JSON for https://shields.io/badges/endpoint-badge.

    The badge of a run that left out checks is grey and reports their number.
    """
    message = f"protocol version {certificate.protocol_version}: {score(certificate)}"
    if certificate.left_out:
        message += f", {len(certificate.left_out)} left out"
    badge = {"schemaVersion": 1, "label": "inflight contract", "message": message, "color": _color(certificate)}
    return json.dumps(badge, indent=2) + "\n"


def _color(certificate: Certificate) -> str:
    if not certificate.conforms:
        return "red"
    if certificate.left_out:
        return "lightgrey"
    return "yellowgreen" if CheckOutcome.EXPECTED_FAILURE in certificate.counts else "brightgreen"


@dataclass(frozen=True, slots=True)
class Report:
    """One format in which a certificate is written to a file."""

    name: str
    """The command's option."""
    what: str
    render: Callable[[Certificate], str]


REPORTS = (
    Report("json", "the certificate as JSON, to keep and compare", certificate_json),
    Report("junit", "JUnit XML, for a build server", junit_xml),
    Report("html", "a self-contained HTML page", html_page),
    Report("badge", "JSON for a badge of shields.io/badges/endpoint-badge", badge_json),
)


def write_reports(certificate: Certificate, files: Mapping[str, Path]) -> None:
    """Write these reports, each atomically. Paths in them that are under the working directory become relative to it.

    Raises `ConfigError` if a file cannot be written.
    """
    here = Path.cwd()
    if here != here.parent:
        prefix = json.dumps(f"{here}/", ensure_ascii=False)[1:-1]
        text = re.sub(rf"(?<![\w./-]){re.escape(prefix)}", "", certificate.model_dump_json())
        certificate = Certificate.model_validate_json(text)
    for report in REPORTS:
        if report.name in files:
            write_output(files[report.name], report.render(certificate))


def read_certificate(file: Path) -> Certificate:
    """Return the certificate in a file. Raises a `ConfigError` that names the file and the problem."""
    try:
        return Certificate.model_validate_json(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"certificate {str(file)!r} cannot be read: {error.strerror}") from error
    except pydantic.ValidationError as error:
        raise ConfigError(
            f"{str(file)!r} is not a certificate of this kit: {describe_problems(error)}; write one with "
            "inflight check ... --json FILE"
        ) from error
