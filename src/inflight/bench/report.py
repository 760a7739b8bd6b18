"""Tables of what was measured, for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.bench.weights import Spread, WayResult

COLUMNS = ("way", "weights", "sent", "gather", "wire", "hold", "load", "first token", "total", "GB/s", "limit", "share")


def rows_of(results: Sequence[WayResult]) -> list[tuple[str, ...]]:
    """Return one row for each result, as texts; spans in milliseconds."""
    return [
        (
            result.way,
            f"{result.size_bytes / 1e6:,.0f} MB",
            f"{result.sent_bytes / 1e6:,.1f} MB",
            *(_ms(result.spans[name]) for name in ("gather", "wire", "hold", "load")),
            _ms(result.busy["first_token"]) if "first_token" in result.busy else "",
            _ms(result.spans["total"]),
            f"{result.gb_per_s:.2f}",
            f"{result.limit} {_ms(result.limit_s)}",
            f"{100 * result.share_of_limit:.0f} %",
        )
        for result in results
    ]


def table(results: Sequence[WayResult]) -> str:
    """Return the table as aligned text."""
    rows = [COLUMNS, *rows_of(results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _ms(spread: Spread) -> str:
    return f"{1000 * spread.median:,.0f} ms"
