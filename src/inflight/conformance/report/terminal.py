"""Terminal output: one line per check as it ends, then where to look, the counts and the time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.text import Text

from inflight.base.printable import printable
from inflight.conformance.checks import Check
from inflight.conformance.report.summary import caveats, duration, headline, slowest, time_spent, title
from inflight.conformance.report.text import fact_lines
from inflight.conformance.verdicts import BAD_OUTCOMES, Certificate, CheckOutcome, Verdict

_STYLES = {
    CheckOutcome.PASSED: "green",
    CheckOutcome.FAILED: "bold red",
    CheckOutcome.HUNG: "bold magenta",
    CheckOutcome.SKIPPED: "dim",
    CheckOutcome.EXPECTED_FAILURE: "yellow",
    CheckOutcome.UNEXPECTED_PASS: "bold yellow",
}
_OUTCOME_WIDTH = max(len(outcome) for outcome in CheckOutcome)
_LONGEST_FACT = 300
"""Maximum number of characters in a line of evidence; other reports show the whole line."""
_LINE_EVERY_S = 8.0
"""If the output is not a terminal, a line reports the running check after this many seconds without a verdict."""


def open_console() -> Console:
    """Return a console on standard output that prints text literally."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


@contextlib.contextmanager
def progress(console: Console, checks: Sequence[Check]) -> Iterator[Callable[[Verdict], None]]:
    """Yield a function that prints a verdict, to be called as each one arrives.

    On a terminal, the running check is also shown; elsewhere, a line reports it if it takes long.
    """
    num_done = 0
    last_level = ""
    last_line = last_verdict = time.monotonic()
    ended = threading.Event()

    def running() -> Text:
        if num_done >= len(checks):
            return Text("")
        check = checks[num_done]
        line = Text(
            f"{num_done + 1} of {len(checks)}  {check.id} {check.requirement}", no_wrap=True, overflow="ellipsis"
        )
        line.truncate(max(20, console.width - 4), overflow="ellipsis")
        return line

    def report_running() -> None:
        nonlocal last_line
        while not ended.wait(1.0):
            if time.monotonic() - last_line > _LINE_EVERY_S and num_done < len(checks):
                last_line = time.monotonic()
                console.print(Text(f"  running for {last_line - last_verdict:.0f} s: {running()}"))

    with contextlib.ExitStack() as stack:
        status = stack.enter_context(console.status(running())) if console.is_terminal else None
        if status is None:
            threading.Thread(target=report_running, name="inflight-check-progress", daemon=True).start()
            stack.callback(ended.set)

        def on_verdict(verdict: Verdict) -> None:
            nonlocal num_done, last_level, last_line, last_verdict
            last_line = last_verdict = time.monotonic()
            if verdict.level != last_level:
                console.print(Text(printable(verdict.level), style="bold"))
                last_level = verdict.level
            console.print(_line(verdict, console.width if console.is_terminal else None))
            num_done += 1
            if status is not None:
                status.update(running())

        yield on_verdict


def print_list(console: Console, checks: Sequence[Check]) -> None:
    """Print the ids and requirements of checks, by level."""
    last_level = ""
    for check in checks:
        if check.level != last_level:
            console.print(Text(check.level, style="bold"))
            last_level = check.level
        console.print(Text(f"  {check.id}  {check.requirement}"))


def print_certificate(console: Console, certificate: Certificate) -> None:
    """Print where to look, the counts, where the time went, and whether the implementation conforms."""
    for verdict in certificate.verdicts:
        if verdict.outcome in BAD_OUTCOMES:
            _print_findings(console, verdict)
    _print_time(console, certificate)
    console.print()
    counts = Text("  ").join(
        Text(f"{num_verdicts} {outcome}", style=_STYLES[outcome])
        for outcome, num_verdicts in certificate.counts.items()
    )
    console.print(counts)
    for caveat in caveats(certificate):
        console.print(Text(printable(caveat), style="yellow"))
    style = "bold green" if certificate.conforms else "bold red"
    console.print(Text(printable(f"{title(certificate)}: {headline(certificate)}"), style=style))


def _line(verdict: Verdict, width: int | None) -> Text:
    """Return the id, outcome, seconds, requirement and message, truncated to the width."""
    line = Text(f"  {printable(verdict.id)}  ")
    line.append(verdict.outcome.ljust(_OUTCOME_WIDTH), style=_STYLES[verdict.outcome])
    line.append(f" {duration(verdict.seconds):>8}  ", style="dim")
    line.append(printable(verdict.requirement))
    if reason := verdict.expected or verdict.message:
        first_line = reason.strip().partition("\n")[0]
        line.append(f"  ({printable(first_line)})", style="dim")
    if width is not None:
        line.truncate(width, overflow="ellipsis")
    return line


def _print_findings(console: Console, verdict: Verdict) -> None:
    console.print()
    heading = (f"{printable(verdict.id)} {verdict.outcome}", _STYLES[verdict.outcome])
    console.print(Text.assemble(heading, (f"  {printable(verdict.requirement)}", "bold")))
    facts = fact_lines(verdict.evidence)
    facts = [line if len(line) <= _LONGEST_FACT else f"{line[:_LONGEST_FACT]} ..." for line in facts]
    for name, text in (
        ("seen", verdict.message),
        ("expected", verdict.expected),
        ("measured", "\n".join(facts)),
        ("look at", verdict.look_at),
        ("stacks", verdict.stacks),
    ):
        if text:
            indented = printable(text).rstrip().replace("\n", "\n" + " " * 12)
            console.print(Text.assemble((f"  {name:<8}  ", "dim"), indented))


def _print_time(console: Console, certificate: Certificate) -> None:
    console.print()
    console.print(Text(f"where the time went, {duration(certificate.seconds)} in all", style="bold"))
    for name, seconds in time_spent(certificate):
        share = seconds / certificate.seconds if certificate.seconds else 0.0
        console.print(Text.assemble(f"  {duration(seconds):>8}", (f" {share:>4.0%}  ", "dim"), printable(name)))
    if found := slowest(certificate):
        slow = ", ".join(f"{verdict.id} {duration(verdict.seconds)}" for verdict in found)
        console.print(Text(printable(f"  slowest: {slow}")))
