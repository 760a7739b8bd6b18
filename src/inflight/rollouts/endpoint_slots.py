"""The endpoints of a dispatcher: which of them accept work, and how many of their slots are in use."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from inflight.contracts.scheduling import Joined, Left, Published
from inflight.rollouts.driver_commands import IdleEndpoint, Outbox, SendRequest, StopRequests
from inflight.rollouts.slots import SlotAccount


@dataclass(slots=True, eq=False)
class EndpointSlots:
    """One endpoint, how many completions it may run at a time, and the version that was last published to it."""

    name: str
    capacity: int
    keeps_partials: bool
    """Whether the tokens of an aborted completion are kept."""
    version: int | None = None
    """The version last published to the endpoint; None while it receives no work."""
    is_retired: bool = False
    requests: dict[str, SendRequest] = field(default_factory=dict)
    """The requests whose end has not been reported, in the order in which they were sent."""
    num_held: int = 0
    """Number of completions of these requests."""
    withdrawn: set[str] = field(default_factory=set)
    """The requests that are being stopped and whose slots the scheduler counts as free."""

    @property
    def takes_work(self) -> bool:
        """Whether the endpoint may receive requests."""
        return self.version is not None and not self.is_retired

    @property
    def num_free(self) -> int:
        """Number of completions that a scheduler may issue here now; slots of withdrawn requests count as free."""
        if not self.takes_work:
            return 0
        num_withdrawn = sum(len(self.requests[request_id].numbers) for request_id in self.withdrawn)
        return self.capacity - self.num_held + num_withdrawn


@dataclass(slots=True)
class EndpointPool:
    """All endpoints by name.

    A completion holds its slot until the end of its request is reported, but a scheduler may issue another one in its
    place as soon as the request is withdrawn; the new completion may have to wait in the engine.
    """

    outbox: Outbox
    slots: dict[str, EndpointSlots] = field(default_factory=dict)
    account: SlotAccount = field(default_factory=SlotAccount)
    lost: dict[str, str] = field(default_factory=dict)
    """The endpoints that receive no work because they failed, each with the reason."""

    @property
    def is_unserved(self) -> bool:
        """Whether no endpoint accepts work."""
        return not any(slots.takes_work for slots in self.slots.values())

    def count(self) -> tuple[int, int]:
        """Return the number of slots of the endpoints that accept work, and how many of them are free."""
        working = [slots for slots in self.slots.values() if slots.takes_work]
        num_slots = sum(slots.capacity for slots in working)
        return num_slots, num_slots - sum(slots.num_held for slots in working)

    def add(self, name: str, capacity: int, *, keeps_partials: bool, now: float) -> None:
        """Add an endpoint that may run ``capacity`` completions; it receives work once `serve` names it."""
        self.slots[name] = EndpointSlots(name, capacity, keeps_partials)
        self._note(self.slots[name], now)

    def serve(self, names: Collection[str], version: int, now: float) -> None:
        """Give work to these endpoints and no others.

        ``version`` was published to them; 0 if the version is unknown.
        """
        for slots in self.slots.values():
            if slots.name not in names:
                self.lose(slots.name, f"the endpoint could not be updated to version {version}", now)
                continue
            took_work, slots.version = slots.takes_work, version
            self.lost.pop(slots.name, None)
            self._note(slots, now)
            if slots.takes_work and not took_work:
                self.outbox.notify(Joined(now, slots.name, slots.capacity, slots.keeps_partials))
        self.outbox.notify(Published(now, version))

    def lose(self, name: str, reason: str, now: float) -> None:
        """Send an endpoint no work until `serve` names it again; its running requests are repeated elsewhere."""
        if (slots := self.slots.get(name)) is None:
            return
        self.lost.setdefault(name, reason)
        self._leave(slots, now)
        if slots.version is not None:
            self.stop(slots.requests.values(), keeps_partials=False)
        slots.version = None
        self._note(slots, now)

    def retire(self, name: str, now: float, *, hands_on: bool = False) -> None:
        """Send an endpoint no more work, and remove it once its requests have ended.

        With ``hands_on``, its requests are stopped, and their completions continue elsewhere.
        """
        if (slots := self.slots.get(name)) is None:
            return
        self._leave(slots, now)
        slots.is_retired = True
        if hands_on:
            self.stop(slots.requests.values())
        self._note(slots, now)
        self.forget_if_idle(slots, now)

    def hold(self, request: SendRequest, slots: EndpointSlots, now: float) -> None:
        """Mark the slots of a request as used, and command the driver to send it."""
        slots.requests[request.request_id] = request
        slots.num_held += len(request.numbers)
        self._note(slots, now)
        self.outbox.command(request)

    def release(self, request: SendRequest, now: float) -> EndpointSlots:
        """Mark the slots of a request as free, and return its endpoint."""
        slots = self.slots[request.endpoint]
        del slots.requests[request.request_id]
        slots.withdrawn.discard(request.request_id)
        slots.num_held -= len(request.numbers)
        self._note(slots, now)
        return slots

    def stop(self, requests: Iterable[SendRequest], *, keeps_partials: bool = True) -> None:
        """Stop requests with one command per endpoint; ``keeps_partials`` applies to the endpoints that support it."""
        by_endpoint: dict[str, list[str]] = {}
        for request in requests:
            by_endpoint.setdefault(request.endpoint, []).append(request.request_id)
        for name, request_ids in by_endpoint.items():
            keeps = keeps_partials and self.slots[name].keeps_partials
            self.outbox.command(StopRequests(name, tuple(request_ids), keeps_partials=keeps))

    def withdraw(self, requests: Sequence[SendRequest], *, keeps_partials: bool = True) -> None:
        """Stop requests whose slots the scheduler counts as free from now on."""
        for request in requests:
            self.slots[request.endpoint].withdrawn.add(request.request_id)
        self.stop(requests, keeps_partials=keeps_partials)

    def forget_if_idle(self, slots: EndpointSlots, now: float) -> None:
        """Remove a retired endpoint that has no requests left."""
        if slots.is_retired and not slots.requests and self.slots.pop(slots.name, None) is not None:
            self.account.forget(now, slots.name)
            self.lost.pop(slots.name, None)
            self.outbox.command(IdleEndpoint(slots.name))

    def _leave(self, slots: EndpointSlots, now: float) -> None:
        if slots.takes_work:
            self.outbox.notify(Left(now, slots.name))

    def _note(self, slots: EndpointSlots, now: float) -> None:
        """Account for the time until now, and continue with the endpoint's current state."""
        self.account.note(now, slots.name, slots.capacity, slots.num_held, takes_work=slots.takes_work)
