"""Reports on pairs of an engine and a trainer, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from inflight.conformance.parity.figures import Figures
from inflight.conformance.parity.measuring import OTHER_TEMPERATURE, PairMeasurements
from inflight.conformance.parity.verdict import findings_of
from inflight.conformance.verdicts import plain


def row_of(engine: str, version: str, trainer: str, measured: PairMeasurements) -> dict[str, Any]:
    """Return the measurements of one pair in one dtype as JSON values."""
    found = [asdict(finding) for finding in findings_of(measured)]
    names = {"engine": engine, "engine_version": version, "trainer": trainer}
    row: dict[str, Any] = plain(asdict(measured))
    return {**names, "agrees": measured.agrees, "findings": found, "grown": plain(measured.grown), "measured": row}


def text_of(engine: str, version: str, trainer: str, measured: PairMeasurements) -> str:
    """Return a readable report on one pair in one dtype."""
    lines = [f"{engine} {version} in {measured.dtype} compared with {trainer}, in nats:", *_table(measured), ""]
    lines += [f"  {name}: {side.from_reference:.2g} from transformers in float32, on average"
              for name, side in (("engine ", measured.engine), ("trainer", measured.trainer))]  # fmt: skip
    lines.append("")
    if measured.agrees:
        return "\n".join([*lines, f"They agree: no logprob differs by more than {measured.tolerance:g}.", ""])
    lines.append(f"They DIFFER (one logprob may differ by {measured.tolerance:g}).")
    for number, finding in enumerate(findings_of(measured), 1):
        lines += [f"  {number}. {finding.seen}", f"     look at: {finding.look_at}"]
    if not findings_of(measured):
        lines.append("  No figure stands out: the difference has no single cause that this command looks for.")
    if measured.bisection is None:
        lines.append(f"  Not bisected: {measured.not_bisected}.")
    return "\n".join([*lines, ""])


def _table(measured: PairMeasurements) -> Iterator[str]:
    rows = {
        "the same weights": measured.same_weights,
        f"at temperature {OTHER_TEMPERATURE:g}": measured.other_temperature,
        "all prompts at once": measured.together,
        f"after {measured.num_updates} updates": measured.after_updates,
    }
    if (found := measured.bisection) is not None:
        rows |= {"attention off": found.attention_off, "MLPs off": found.mlp_off, "all layers off": found.layers_off}
        rows |= {f"first {depth} layers": figures for depth, figures in sorted(found.depths.items())}
    yield f"  {'':22}{'k1':>10}{'k3':>10}{'ESS':>11}{'largest':>10}{'mean':>10}{'tokens':>8}"
    for name, figures in rows.items():
        yield f"  {name:22}{_numbers(figures)}"


def _numbers(figures: Figures) -> str:
    return (
        f"{figures.k1:>10.1e}{figures.k3:>10.1e}{figures.ess:>11.6f}{figures.largest:>10.1e}{figures.mean:>10.1e}"
        f"{figures.num_tokens:>8}"
    )
