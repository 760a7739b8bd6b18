"""The incarnations of runs' trainers: which trainer of a run is the latest, and which ones were replaced."""

from __future__ import annotations

from inflight.errors import FencedError

_NUM_REMEMBERED = 256
"""How many runs' incarnations are remembered, to recognize late calls."""
_NUM_REPORTED = 16
"""How many runs' incarnations are reported, so that a run that returns can begin a higher one."""


class Incarnations:
    """The highest incarnation of each run that has called an endpoint."""

    def __init__(self) -> None:
        self._highest: dict[str, int] = {}

    def highest(self, run_id: str | None) -> int:
        """Return the highest incarnation of a run; 0 if it is unknown."""
        return 0 if run_id is None else self._highest.get(run_id, 0)

    def reported(self) -> dict[str, int]:
        """Return the highest incarnation of each of the 16 runs that called most recently."""
        return dict(list(self._highest.items())[-_NUM_REPORTED:])

    def admit(self, run_id: str, incarnation: int) -> None:
        """Raise `FencedError` if a later incarnation has replaced this one; otherwise record it.

        The trainer of a run that is no longer reported could not read the run's highest incarnation, so its own
        incarnation may equal that of an earlier trainer. Its call is therefore refused unless its incarnation is higher
        than the highest, or the highest is 0 because the run's trainers do not count incarnations.
        """
        highest = self.highest(run_id)
        if incarnation <= highest and highest > 0 and run_id not in self.reported():
            raise FencedError(
                f"incarnation {incarnation} of run {run_id!r} is refused: this server remembers incarnation {highest}, "
                f"but it reports only its last {_NUM_REPORTED} runs, and this run is no longer among them. If another "
                f"trainer has replaced this one, stop this one; otherwise pass incarnation={highest + 1} to "
                "WeightPublisher.connect, or restart the server"
            )
        if incarnation < highest:
            raise FencedError(
                f"the trainer of run {run_id!r} was replaced: this call comes from its incarnation {incarnation}, "
                f"but incarnation {highest} has taken over. Stop this trainer"
            )
        self._highest.pop(run_id, None)
        self._highest[run_id] = incarnation  # moved to the end: the latest caller is forgotten last
        if len(self._highest) > _NUM_REMEMBERED:
            del self._highest[next(iter(self._highest))]
