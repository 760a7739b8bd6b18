"""What must be true of a schedule, whatever struck it.

- Never a hang: every publish ends within its deadline and the time to clean up; no hold outlives its lease.
- Never a false success: who is reported as applied holds that version bit by bit, and says so; a publish that returns
  reached its quorum; no version of a trainer comes after a later one has joined.
- Never torn weights: what is sampled from is of one version; who is poisoned refuses to generate.
- True spans, and no work lost: see `inflight.conformance.chaos.clients`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from inflight.conformance.chaos.clients import Conversation, problems_of
from inflight.conformance.chaos.palette import Palette, Shade
from inflight.conformance.chaos.servers import EmbeddedServer
from inflight.conformance.chaos.trainer import CLEAN_UP_S, Published, Trainer
from inflight.errors import InflightError, PoisonedError
from inflight.types import Outcome
from inflight.wire import EndpointState, GenerateRequest, SamplingParams


def outcome(published: Published) -> str:
    """Return one line for statistics."""
    said = "returned" if published.error is None else type(published.error).__name__
    kinds = [] if published.report is None else sorted(e.outcome.value for e in published.report.endpoints)
    return ":".join((said, *kinds))


def publishes(trainers: Sequence[Trainer], servers: Sequence[EmbeddedServer]) -> list[str]:
    """Return what is wrong with what publishes said, and how long they took."""
    problems = []
    all_lived = all(len(server.lives) == 1 for server in servers)  # one that comes back has forgotten who fenced whom
    for trainer in trainers:
        for one in trainer.published:
            what, took_s = f"the publish of {one.shade}", one.ended - one.started
            if took_s > one.deadline_s + CLEAN_UP_S:
                problems.append(f"{what} took {took_s:.1f} s, its deadline was {one.deadline_s} s")
            if one.report is None:
                continue
            names = tuple(e.endpoint for e in one.report.endpoints)
            num_applied = sum(e.outcome is Outcome.APPLIED for e in one.report.endpoints)
            num_needed = len(one.endpoints) if one.quorum is None else one.quorum
            if names != one.endpoints:
                problems.append(f"{what} went to {one.endpoints}, its report is of {names}")
            if one.succeeded != (num_applied >= num_needed):
                problems.append(f"{what}: {num_applied} of {num_needed} applied it, success was {one.succeeded}")
            later = [other for t in trainers if t.epoch > trainer.epoch for other in t.published]
            if one.succeeded and all_lived and any(_is_everywhere(other, before=one.started) for other in later):
                problems.append(f"{what} succeeded although a later trainer had published everywhere")
    return problems


def _is_everywhere(published: Published, before: float) -> bool:
    """Return whether a publish had reached every endpoint by then."""
    return published.ended < before and published.report is not None and published.report.applied_everywhere


async def served(servers: Sequence[EmbeddedServer], published: Published, *, is_alone: bool) -> list[str]:
    """Return where a report differs from what servers hold. ``is_alone``: no other trainer is publishing now."""
    problems = []
    reports = {} if published.report is None else {e.endpoint: e for e in published.report.endpoints}
    for server in servers:
        report = reports.get(server.name)
        is_applied = report is not None and report.outcome is Outcome.APPLIED
        life = server.life
        shade, said, is_steady = None, None, False
        if life is not None:
            with contextlib.suppress(InflightError):  # it died meanwhile
                shade = await server.shade()
                said = await life.endpoint.weight_version()
                is_steady = shade == await server.shade()
        seen = [shade for life in server.lives for shade in life.shades]
        if is_applied and published.shade not in seen and not any(life.was_killed for life in server.lives):
            problems.append(f"{server.name} is reported to have applied {published.shade}, it never held it: {seen}")
        if said is None:
            continue
        if said.state is EndpointState.POISONED:
            problems += await _poisoned(server)
        elif said.state is EndpointState.READY and is_steady:
            if shade is None or shade.version != said.version:
                problems.append(f"{server.name} says that it serves version {said.version}, it holds {shade}")
            elif is_applied and is_alone and len(server.lives) == 1 and shade != published.shade:
                problems.append(f"{server.name} is reported to serve {published.shade}, it holds {shade}")
        serves = None if report is None else report.serves
        is_comparable = serves is not None and is_alone and is_steady and len(server.lives) == 1
        if is_comparable and shade is not None and shade.version != serves:
            problems.append(f"{server.name} is reported to serve version {serves}, it holds {shade}")
    return problems


async def _poisoned(server: EmbeddedServer) -> list[str]:
    """Return what is wrong with a server that says that its weights are torn."""
    assert server.life is not None
    problems = [] if server.life.was_torn else [f"{server.name} is poisoned, nothing has torn it"]
    request = GenerateRequest(request_id="poisoned", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1))
    try:
        await server.life.endpoint.generate(request)
    except PoisonedError:
        return problems
    return [*problems, f"{server.name} is poisoned and generates"]


async def together(servers: Sequence[EmbeddedServer], shade: Shade) -> list[str]:
    """Return which servers the last, clean publish did not reach."""
    problems = []
    for server in servers:
        if server.life is None:
            continue
        found, said = await server.shade(), await server.life.endpoint.weight_version()
        if (found, said.state, said.version) != (shade, EndpointState.READY, shade.version):
            problems.append(f"{server.name} is {said.state} with {found} after the last publish, of {shade}")
    return problems


def lives(servers: Sequence[EmbeddedServer]) -> list[str]:
    """Return what was seen of servers that must not be."""
    problems = []
    for server in servers:
        problems += [f"{server.name}: {problem}" for problem in server.problems]
        for life in server.lives:
            problems += [f"{server.name}: {problem}" for problem in life.problems]
            for index, epoch in life.fenced_at:
                old = [shade for shade in life.shades[index:] if shade is not None and 0 < shade.epoch < epoch]
                if old:
                    problems.append(f"{server.name} took {old[0]} after the trainer of epoch {epoch} had joined")
    return problems


def conversations(all_conversations: Sequence[Conversation], palette: Palette) -> list[str]:
    """Return what is wrong with what clients got."""
    return [
        f"{conversation.server.name}: {problem}"
        for conversation in all_conversations
        for problem in problems_of(conversation, palette)
    ]
