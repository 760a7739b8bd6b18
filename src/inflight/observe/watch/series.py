"""Series of numbers by step or by time, in a bounded number of bins. When all bins are full, pairs are merged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

NUM_BINS = 1024
NUM_COLUMNS = 256
_FIRST_WIDTH_S = 0.1
_LARGEST = 1 << 1000
"""Integers of this size or more may not be representable as floats."""

Array = np.ndarray[Any, np.dtype[Any]]


class StepTable:
    """Named numbers that steps report, as their mean, minimum and maximum in each bin of consecutive versions."""

    def __init__(self) -> None:
        self.width = 1
        """Number of versions in a bin; bin i begins at version i * width."""
        self.last = 0
        """Newest version."""
        self._columns: dict[str, int] = {}
        self._no_numbers: set[str] = set()
        """Names whose first values were not numbers."""
        self._counts = np.zeros((NUM_BINS, 0), dtype=np.int64)
        self._sums = np.zeros((NUM_BINS, 0))
        self._lows = np.zeros((NUM_BINS, 0))
        self._highs = np.zeros((NUM_BINS, 0))
        self.first_not_finite: dict[str, int] = {}
        """The first version whose number is NaN or infinite, by name."""

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def add(self, versions: Sequence[int], columns: Mapping[str, Sequence[Any]]) -> None:
        """Add the values that steps report, in the order of the steps' versions. Leave out what is not a number."""
        self._add_columns(columns)
        self._make_room(versions[-1])
        self.last = versions[-1]
        if not self._columns:
            return
        values = np.full((len(self._columns), len(versions)), np.nan)
        for name in self._columns.keys() & columns.keys():
            values[self._columns[name]] = _numbers(columns[name])
        is_bad = ~np.isfinite(values)
        if is_bad.any():
            self._note_not_finite(versions, columns, is_bad)
            values[is_bad] = np.nan
        bins = np.asarray(versions, dtype=np.int64) // self.width
        starts = np.flatnonzero(np.diff(bins, prepend=-1))
        at = bins[starts]
        self._counts[at] += np.add.reduceat((~is_bad).astype(np.int64), starts, axis=1).T
        self._sums[at] += np.add.reduceat(np.where(is_bad, 0.0, values), starts, axis=1).T
        self._lows[at] = np.fmin(self._lows[at], np.fmin.reduceat(values, starts, axis=1).T)
        self._highs[at] = np.fmax(self._highs[at], np.fmax.reduceat(values, starts, axis=1).T)

    def forget_from(self, version: int) -> None:
        """Drop the bin of a version and all later bins."""
        self.last = min(self.last, version - 1)
        first = version // self.width
        self._counts[first:], self._sums[first:] = 0, 0.0
        self._lows[first:], self._highs[first:] = np.nan, np.nan
        self.first_not_finite = {name: bad for name, bad in self.first_not_finite.items() if bad < version}

    def bins(self) -> list[int]:
        """Return the indices of the bins that have a value."""
        return [int(i) for i in np.flatnonzero(self._counts.any(axis=1))]

    def values(self, name: str, bins: Sequence[int]) -> dict[str, list[float]]:
        """Return the ``mean`` of one number, NaN where it is missing, and ``low`` and ``high`` if bins have several
        versions.
        """
        column = self._columns[name]
        counts = self._counts[bins, column]
        with np.errstate(invalid="ignore", divide="ignore"):
            found = {"mean": rounded(self._sums[bins, column] / counts)}
        if self.width > 1:
            found |= {"low": rounded(self._lows[bins, column]), "high": rounded(self._highs[bins, column])}
        return found

    def latest(self, name: str) -> float | None:
        """Return the mean of the newest bin that has this number."""
        if (column := self._columns.get(name)) is None:
            return None
        (found,) = np.nonzero(self._counts[:, column])
        return float(self._sums[found[-1], column] / self._counts[found[-1], column]) if len(found) else None

    def _add_columns(self, columns: Mapping[str, Sequence[Any]]) -> None:
        for name in sorted(columns.keys() - self._columns.keys() - self._no_numbers):
            values = [value for value in columns[name] if value is not None]
            if len(self._columns) < NUM_COLUMNS and any(map(_is_number, values)):
                self._columns[name] = len(self._columns)
            elif values:
                self._no_numbers.add(name)
        missing = len(self._columns) - self._counts.shape[1]
        self._counts = np.pad(self._counts, ((0, 0), (0, missing)))
        self._sums = np.pad(self._sums, ((0, 0), (0, missing)))
        self._lows = np.pad(self._lows, ((0, 0), (0, missing)), constant_values=np.nan)
        self._highs = np.pad(self._highs, ((0, 0), (0, missing)), constant_values=np.nan)

    def _make_room(self, version: int) -> None:
        while version // self.width >= NUM_BINS:
            self.width *= 2
            self._counts, self._sums = _merge_pairs(self._counts, np.add), _merge_pairs(self._sums, np.add)
            self._lows, self._highs = (
                _merge_pairs(self._lows, np.fmin, np.nan),
                _merge_pairs(self._highs, np.fmax, np.nan),
            )

    def _note_not_finite(self, versions: Sequence[int], columns: Mapping[str, Sequence[Any]], is_bad: Array) -> None:
        for name in columns.keys() & self._columns.keys() - self.first_not_finite.keys():
            for i in np.flatnonzero(is_bad[self._columns[name]]).tolist():
                if _is_number(columns[name][i]):
                    self.first_not_finite[name] = versions[i]
                    break


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Sequence[Any]]:
    """Return the values of each name; None where a row lacks the name."""
    names = tuple(rows[0])
    if all(tuple(row) == names for row in rows):
        return dict(zip(names, zip(*(row.values() for row in rows), strict=True), strict=True))
    every = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in every}


class VersionCounts:
    """Counts of small integers, in bins of consecutive versions."""

    LARGEST = 64
    """Larger numbers are counted as this number."""

    def __init__(self) -> None:
        self._width = 1
        self._counts: dict[int, list[float]] = {}
        """Counts by bin. They are lists because numpy would be slower for the few numbers of a step."""

    def add(self, version: int, counts: Iterable[tuple[int, float]]) -> None:
        while version // self._width >= NUM_BINS:
            self._halve()
        if (row := self._counts.get(version // self._width)) is None:
            row = self._counts[version // self._width] = [0.0] * (self.LARGEST + 1)
        for number, count in counts:
            row[number if 0 <= number < self.LARGEST else self.LARGEST if number > 0 else 0] += count

    def forget_from(self, version: int) -> None:
        self._counts = {at: row for at, row in self._counts.items() if at < version // self._width}

    def total(self) -> list[float]:
        """Return the count of each number, up to the largest that occurred."""
        totals = [sum(row[number] for row in self._counts.values()) for number in range(self.LARGEST + 1)]
        while totals and not totals[-1]:
            totals.pop()
        return totals

    def _halve(self) -> None:
        self._width *= 2
        wider: dict[int, list[float]] = {}
        for at, row in self._counts.items():
            other = wider.get(at // 2)
            wider[at // 2] = row if other is None else [a + b for a, b in zip(row, other, strict=True)]
        self._counts = wider


class TimeBins:
    """Amounts over time, each spread evenly between its start and its end."""

    def __init__(self) -> None:
        self.width_s = _FIRST_WIDTH_S
        self._amounts: dict[str, list[float]] = {}
        """Amounts by name. They are lists because numpy would be slower for the few bins of a span."""
        self.end_s = 0.0

    def add(self, name: str, start_s: float, end_s: float, amount: float) -> None:
        self.end_s = max(self.end_s, end_s)
        while end_s >= NUM_BINS * self.width_s:
            self.width_s *= 2
            for key, old in self._amounts.items():
                joined = [one + other for one, other in zip(old[0::2], old[1::2], strict=True)]
                self._amounts[key] = joined + [0.0] * len(joined)
        amounts = self._amounts.get(name)
        if amounts is None:
            amounts = self._amounts[name] = [0.0] * NUM_BINS
        start_s = max(0.0, start_s)
        first, last = int(start_s / self.width_s), int(end_s / self.width_s)
        if first == last or end_s <= start_s:
            amounts[max(0, last)] += amount
            return
        per_bin = amount * self.width_s / (end_s - start_s)
        amounts[first] += per_bin * (first + 1 - start_s / self.width_s)
        for i in range(first + 1, last):
            amounts[i] += per_bin
        amounts[last] += per_bin * (end_s / self.width_s - last)

    def forget_after(self, time_s: float) -> None:
        """Drop the amounts after ``time_s``."""
        self.end_s = min(self.end_s, time_s)
        first = int(time_s / self.width_s) + 1
        for amounts in self._amounts.values():
            amounts[first:] = [0.0] * (NUM_BINS - first)

    def per_second(self, until_s: float) -> dict[str, list[float]]:
        """Return the rate in each bin up to ``until_s``, where the last bin ends."""
        num = min(NUM_BINS, int(until_s / self.width_s) + 1)
        widths = np.full(num, self.width_s)
        widths[-1] = max(until_s - (num - 1) * self.width_s, self.width_s / 4)
        return {name: rounded(np.array(amounts[:num]) / widths) for name, amounts in self._amounts.items()}


def rounded(values: Array, digits: int = 5) -> list[float]:
    """Return numbers rounded to the few significant digits that a page can show."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scale = 10.0 ** (digits - 1 - np.floor(np.log10(np.abs(values))))
        short = np.where(np.isfinite(scale), np.round(values * scale) / scale, values)
    return [float(it) for it in short]


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < _LARGEST)


def _numbers(values: Sequence[Any]) -> Array:
    """Return the values as floats, with NaN for those that are not numbers."""
    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return np.array([it if _is_number(it) else None for it in values], dtype=np.float64)


def _merge_pairs(values: Array, join: np.ufunc, empty: float = 0) -> Array:
    """Return bins of twice the width, followed by empty bins up to the same number."""
    joined = join(values[0::2], values[1::2])
    return np.concatenate([joined, np.full_like(joined, empty)])
