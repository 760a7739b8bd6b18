"""The endpoints of a dispatcher: which of them take work, and how many of their slots requests hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from inflight.rollouts.open_groups import SendRequest
from inflight.rollouts.slots import SlotAccount


@dataclass(slots=True, eq=False)
class EndpointSlots:
    """One endpoint, the completions that it may run at a time, and the version that was last published to it."""

    name: str
    capacity: int
    keeps_partials: bool
    """Whether what was sampled of an aborted completion is kept."""
    version: int | None = None
    """None while the endpoint gets no work."""
    is_retired: bool = False
    requests: dict[str, SendRequest] = field(default_factory=dict)
    """Those whose end has not been reported, in the order in which they were sent."""
    num_held: int = 0
    """Completions of these requests."""
    withdrawn: set[str] = field(default_factory=set)
    """Requests that are being stopped, and whose slots the scheduler counts as free."""

    @property
    def takes_work(self) -> bool:
        """Whether it may be given requests."""
        return self.version is not None and not self.is_retired

    @property
    def num_free(self) -> int:
        """Completions that a scheduler may issue here now."""
        if not self.takes_work:
            return 0
        num_withdrawn = sum(len(self.requests[request_id].numbers) for request_id in self.withdrawn)
        return self.capacity - self.num_held + num_withdrawn


@dataclass(slots=True)
class EndpointPool:
    """All endpoints by name. A completion holds its slot until the end of its request is reported."""

    endpoints: dict[str, EndpointSlots] = field(default_factory=dict)
    account: SlotAccount = field(default_factory=SlotAccount)
    lost: dict[str, str] = field(default_factory=dict)
    """Endpoints that get no work because they failed, with the reason."""

    @property
    def is_unserved(self) -> bool:
        """Whether no endpoint takes work."""
        return not any(slots.takes_work for slots in self.endpoints.values())

    def count(self) -> tuple[int, int]:
        """Return the slots of the endpoints that take work, and how many of them no completion holds."""
        working = [slots for slots in self.endpoints.values() if slots.takes_work]
        num_slots = sum(slots.capacity for slots in working)
        return num_slots, num_slots - sum(slots.num_held for slots in working)

    def add(self, slots: EndpointSlots, now: float) -> None:
        self.endpoints[slots.name] = slots
        self.note(slots, now)

    def serve(self, slots: EndpointSlots, version: int, now: float) -> bool:
        """Let an endpoint take work with a version; return whether it took none before."""
        took_work, slots.version = slots.takes_work, version
        self.note(slots, now)
        self.lost.pop(slots.name, None)
        return slots.takes_work and not took_work

    def lose(self, slots: EndpointSlots, reason: str, now: float) -> list[str]:
        """Let an endpoint take no work; return its requests, which end now, or none if it was lost before."""
        self.lost.setdefault(slots.name, reason)
        running = [] if slots.version is None else [*slots.requests]
        slots.version = None
        self.note(slots, now)
        return running

    def hold(self, request: SendRequest, slots: EndpointSlots, now: float) -> None:
        slots.requests[request.request_id] = request
        slots.num_held += len(request.numbers)
        self.note(slots, now)

    def withdraw(self, requests: Iterable[SendRequest]) -> None:
        """Count the slots of requests that are being stopped as free for the scheduler."""
        for request in requests:
            self.endpoints[request.endpoint].withdrawn.add(request.request_id)

    def release(self, request: SendRequest, now: float) -> EndpointSlots:
        slots = self.endpoints[request.endpoint]
        del slots.requests[request.request_id]
        slots.withdrawn.discard(request.request_id)
        slots.num_held -= len(request.numbers)
        self.note(slots, now)
        return slots

    def forget_if_idle(self, slots: EndpointSlots, now: float) -> bool:
        """Forget a retired endpoint that has no request left; return whether it is forgotten now."""
        if not slots.is_retired or slots.requests or slots.name not in self.endpoints:
            return False
        del self.endpoints[slots.name]
        self.account.forget(now, slots.name)
        self.lost.pop(slots.name, None)
        return True

    def note(self, slots: EndpointSlots, now: float) -> None:
        """Account for the time until now, and continue with the endpoint as it is."""
        self.account.note(now, slots.name, slots.capacity, slots.num_held, takes_work=slots.takes_work)
