"""The badge of a certificate, for https://shields.io/badges/endpoint-badge."""

from __future__ import annotations

import json

from inflight.conformance.report.summary import score
from inflight.conformance.verdicts import Certificate, Outcome


def badge_json(certificate: Certificate) -> str:
    """Return the badge as the JSON that Shields asks for. A run that left checks out is grey, and its badge says so."""
    message = f"edition {certificate.edition}: {score(certificate)}"
    if certificate.left_out:
        message += f", {len(certificate.left_out)} left out"
    badge = {"schemaVersion": 1, "label": "inflight contract", "message": message, "color": _color(certificate)}
    return json.dumps(badge, indent=2) + "\n"


def _color(certificate: Certificate) -> str:
    if not certificate.conforms:
        return "red"
    if certificate.left_out:
        return "lightgrey"
    return "yellowgreen" if Outcome.EXPECTED_FAILURE in certificate.counts else "brightgreen"
