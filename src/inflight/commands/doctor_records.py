"""The part of ``inflight doctor`` that reads the records of a run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from inflight.base.json_files import check_writable, write_json
from inflight.base.text_tables import align_columns

if TYPE_CHECKING:
    from inflight.doctor.shapes import Diagnosis, Finding

_VERDICTS = {
    "no drift": "No drift: the differences are those of a healthy run.",
    "warning": "Warning: the differences have grown, or a part of the run differs more than the rest.",
    "drift": "Drift: the engine's logprobs differ from the trainer's by more than rounding.",
    "too little data": "Too little data: these records neither show drift nor exclude it.",
}
_COLUMNS = ("", "tokens", "mean |d|", "trimmed", "mean d", "k3", "k3 reverse", "ESS", "largest |d|")


def run(arguments: argparse.Namespace) -> int:
    """Print the differences and the first suspects; return 1 for drift or a warning, and 2 for too little data."""
    from inflight.doctor.records import read_differences
    from inflight.doctor.shapes import diagnose

    check_writable({"json": arguments.json})
    diagnosis = diagnose(read_differences(Path(arguments.target)))
    print("\n".join(_lines_of(diagnosis)))
    write_json(arguments.json, asdict(diagnosis))
    return {"no drift": 0, "too little data": 2}.get(diagnosis.verdict, 1)


def _lines_of(diagnosis: Diagnosis) -> Iterator[str]:
    yield _VERDICTS[diagnosis.verdict]
    if diagnosis.parts:
        rows = [
            (
                name,
                f"{it.num_tokens:,}",
                *(f"{value:.2g}" for value in (it.mean, it.trimmed, it.signed, it.k3, it.k3_reverse)),
                f"{it.effective_sample_size:.4f}",
                f"{it.largest:.2g}",
            )
            for name, it in diagnosis.parts.items()
        ]
        yield ""
        yield "d is the trainer logprob minus the behaviour logprob of a token, in nats, under the same weights."
        yield align_columns([_COLUMNS, *rows])
    for finding in diagnosis.findings:
        yield from _lines_of_finding(finding)
    if diagnosis.notes:
        yield ""
        yield from diagnosis.notes


def _lines_of_finding(finding: Finding) -> Iterator[str]:
    from inflight.doctor.causes import CAUSES
    from inflight.doctor.shapes import EXPERIMENTS

    yield ""
    yield f"{finding.severity}: {finding.shape}"
    yield f"  {finding.evidence}."
    if finding.severity != "note":
        yield "  First suspects:"
        yield from (f"    {number}. {CAUSES[number].name}" for number in finding.suspects)
        yield "  Next experiments:"
        yield from (f"    {name}: {EXPERIMENTS[name]}" for name in finding.experiments)
