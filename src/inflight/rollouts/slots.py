"""Accounts for the use of endpoint slots, in slot-seconds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SlotSeconds:
    """Slot-seconds over a period. A slot holds one completion at a time."""

    all_s: float = 0.0
    """All slots of participating endpoints."""
    open_s: float = 0.0
    """Slots of the endpoints that accept work. The others have failed, are leaving, or could not be updated."""
    running_s: float = 0.0
    """Slots held by completions, on any participating endpoint."""
    free_s: float = 0.0
    """Free slots of the endpoints that accept work."""

    @property
    def utilisation(self) -> float | None:
        """The share of all slot-seconds that completions hold; None if there are none."""
        return self.running_s / self.all_s if self.all_s > 0 else None

    @property
    def bubble_share(self) -> float | None:
        """The free share of the slot-seconds of endpoints that accept work; None if there are none."""
        return self.free_s / self.open_s if self.open_s > 0 else None

    def add(self, other: SlotSeconds) -> None:
        self.all_s += other.all_s
        self.open_s += other.open_s
        self.running_s += other.running_s
        self.free_s += other.free_s


@dataclass(frozen=True, slots=True)
class _Slots:
    num_slots: int
    num_running: int
    takes_work: bool


@dataclass(slots=True)
class SlotAccount:
    """Adds up slot-seconds between the changes that `note` and `forget` report; their times must not decrease."""

    _endpoints: dict[str, _Slots] = field(default_factory=dict)
    _since_s: float = 0.0
    _sum: SlotSeconds = field(default_factory=SlotSeconds)
    _num: SlotSeconds = field(default_factory=SlotSeconds)
    """The current slots of all endpoints, which are added to the sum for every second that passes."""

    def note(self, time_s: float, endpoint: str, num_slots: int, num_running: int, *, takes_work: bool) -> None:
        """Record the number of slots of an endpoint from now on, and how many of them hold a completion."""
        self._advance(time_s)
        self._count(self._endpoints.get(endpoint), -1)
        self._endpoints[endpoint] = _Slots(num_slots, num_running, takes_work)
        self._count(self._endpoints[endpoint], 1)

    def forget(self, time_s: float, endpoint: str) -> None:
        """Record that the endpoint no longer takes part."""
        self._advance(time_s)
        self._count(self._endpoints.pop(endpoint, None), -1)

    def take(self, time_s: float) -> SlotSeconds:
        """Return the slot-seconds since the last call."""
        self._advance(time_s)
        taken, self._sum = self._sum, SlotSeconds()
        return taken

    def _advance(self, time_s: float) -> None:
        elapsed_s, self._since_s = time_s - self._since_s, time_s
        self._sum.all_s += elapsed_s * self._num.all_s
        self._sum.running_s += elapsed_s * self._num.running_s
        self._sum.open_s += elapsed_s * self._num.open_s
        self._sum.free_s += elapsed_s * self._num.free_s

    def _count(self, slots: _Slots | None, sign: int) -> None:
        if slots is None:
            return
        self._num.all_s += sign * slots.num_slots
        self._num.running_s += sign * slots.num_running
        if slots.takes_work:
            self._num.open_s += sign * slots.num_slots
            self._num.free_s += sign * (slots.num_slots - slots.num_running)
