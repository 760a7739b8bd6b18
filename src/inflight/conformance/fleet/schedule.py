"""One schedule: busy servers, one or two trainers that publish, and faults.

`inflight.conformance.fleet.judge` judges the result.
"""

from __future__ import annotations

import itertools
import random
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from inflight.conformance.fleet import judge
from inflight.conformance.fleet.campaign import ScheduleResult
from inflight.conformance.fleet.clients import Exchange, converse, problems_of
from inflight.conformance.fleet.faults import Faults, FaultyEndpoint
from inflight.conformance.fleet.palette import FROZEN
from inflight.conformance.fleet.plan import TRANSPORTS, Kind, Transport, fault_plan
from inflight.conformance.fleet.servers import Testbed, TestedServer
from inflight.conformance.fleet.trainer import FleetTrainer, TrainerSettings
from inflight.errors import ConfigError

_END_S = 15.0
"""How long, in seconds, clients may take to finish their last request."""
_FINAL_DEADLINE_S = 10.0
_PAUSES_S = (0.1, 1.0)
"""Seconds between two requests of a client, for trainers with one rank and with two; a second rank also needs CPU time.
"""
_RANKS_SCALE = 3.0
"""Factor for the deadlines of trainers with two ranks, which exchange messages for each bucket."""
_PAUSE_SLACK_S = 3.0  # the machine may be busy with other schedules
_JUDGE_S = 60.0


def transport_of(seed: int, testbed: Testbed) -> Transport:
    """Return the transport of a seed's schedule. Raises `ConfigError` if the servers support none of `TRANSPORTS`."""
    supported = [it for it in TRANSPORTS if it in testbed.capabilities.transports]
    if not supported:
        raise ConfigError(
            f"the servers support none of the transports {', '.join(TRANSPORTS)} over which a fleet is checked"
        )
    return supported[seed % len(supported)]


def run_schedule(
    seed: int, testbed: Testbed, transport: Transport | None = None, num_senders: int = 1
) -> ScheduleResult:
    """Return the judged result of a seed's schedule. If ``transport`` is None, the seed determines it.

    If ``num_senders`` is 2, trainers have a second rank, which sends a part of the weights.
    """
    schedule = _Schedule(seed, testbed, transport, num_senders)
    with testbed.servers(schedule.palette, schedule.frozen) as servers:
        started = time.monotonic()
        try:
            schedule.run(servers)
        finally:
            schedule.close()
        return schedule.result(time.monotonic() - started)


def judged(seed: int, testbed: Testbed, transport: Transport | None = None, num_senders: int = 1) -> ScheduleResult:
    """Return the result of a seed's schedule. A schedule that raises an error counts as failed.

    Raises `ConfigError` if the servers do not start.
    """
    try:
        return run_schedule(seed, testbed, transport, num_senders)
    except ConfigError:
        raise
    except Exception:
        transport = transport or transport_of(seed, testbed)
        return ScheduleResult(seed, transport, f"seed {seed}", problems=(traceback.format_exc(),))


class _Schedule:
    """One schedule: the settings drawn from its seed, and its result."""

    def __init__(self, seed: int, testbed: Testbed, transport: Transport | None, num_senders: int) -> None:
        self._random = random_ = random.Random(f"schedule {seed} {transport}")
        transport = transport or transport_of(seed, testbed)
        scale = testbed.scale * (1.0 if num_senders == 1 else _RANKS_SCALE)
        self._final_s = _FINAL_DEADLINE_S * scale
        deadline_s = random_.choice((0.5, 0.8)) * scale
        self._testbed = testbed
        self._loop = testbed.loop
        self._plan = fault_plan(seed, testbed.num_servers, transport, deadline_s, testbed.kinds, num_senders)
        self._settings = TrainerSettings.drawn(random_, self._plan, testbed, deadline_s, num_senders)
        has_frozen = random_.random() < 0.2 and testbed.capabilities.partial_updates
        self.frozen = FROZEN if has_frozen else ()
        self.palette = testbed.palette(seed, self.frozen)
        self._first_version = 1 + max(shade.version for shade in self.palette.shades)
        self._directory = Path(tempfile.mkdtemp(dir=testbed.directory))
        lease_s = deadline_s + 0.4 * testbed.scale
        self._longest_pause_s = deadline_s + lease_s + _PAUSE_SLACK_S * testbed.scale
        self._faults = Faults(self._plan, testbed, lease_s, cancel_arrives=random_.random() < 0.5)
        self._servers: Sequence[TestedServer] = ()
        self._trainers: list[FleetTrainer] = []
        self._conversations: list[list[Exchange]] = []
        """The requests of each client."""
        self._is_over = threading.Event()
        """Signals the clients to end."""
        self._tasks: list[Future[None]] = []
        self._problems: list[str] = []

    def run(self, servers: Sequence[TestedServer]) -> None:
        random_, self._servers = self._random, servers
        for i, server in enumerate(servers):
            endpoint = FaultyEndpoint(server, i, self._faults, threading.Event())
            name, vocab_size = f"client-{self._plan.seed}-{i}", self._testbed.capabilities.vocab_size
            self._conversations.append([])
            talk = converse(
                endpoint,
                name,
                random.Random(random_.random()),
                vocab_size,
                self._is_over,
                self._conversations[i],
                _PAUSES_S[self._settings.num_senders - 1],
            )
            self._tasks.append(self._loop.start(talk))
        for server in servers:
            watching = judge.watch(server, lambda: self._longest_pause_s, self._problems.append)
            self._tasks.append(self._loop.start(watching))
        first = self._trainer(None)
        is_challenged = any(fault.kind is Kind.TAKE_OVER for fault in self._plan.faults)
        challenger = threading.Thread(target=self._challenge, args=(first,), daemon=True)
        if is_challenged:
            challenger.start()
        next_version = self._train(first, random_.randint(2, 3), random.Random(random_.random()), self._first_version)
        if is_challenged:
            self._faults.take_over.set()
            challenger.join(_END_S * self._testbed.scale + 20 * self._settings.deadline_s)
            if challenger.is_alive():
                self._problems.append("the second trainer hangs")
        elif first.is_dead.is_set():
            self._train(self._trainer(None), 2, random.Random(random_.random()), next_version)
        self._bring_all_together()
        self._end_clients()

    def result(self, wall_s: float) -> ScheduleResult:
        published = [one for trainer in self._trainers for one in trainer.published]
        conversations = list(itertools.chain(*self._conversations))
        problems = [*self._problems, *self._faults.problems]
        for trainer in self._trainers:
            problems += trainer.problems
        problems += judge.publishes(self._trainers, self._servers, self._testbed.scale)
        for server in self._servers:
            problems += [f"{server.name}: {problem}" for problem in server.problems()]
        for it in conversations:
            may_abort = it.server in self._faults.aborted
            found = problems_of(it, self.palette, self._testbed.capabilities, may_abort=may_abort)
            problems += [f"{it.server.name}: {problem}" for problem in found]
        completions = [it for one in conversations if one.response is not None for it in one.response.completions]
        return ScheduleResult(
            seed=self._plan.seed,
            transport=self._plan.transport,
            plan=str(self._plan),
            settings=str(self._settings),
            problems=tuple(dict.fromkeys(problems)),
            injected=tuple((fault.step.value, fault.kind.value) for fault in self._faults.injected),
            outcomes=tuple(judge.outcome(one) for one in published),
            slowest_publish_s=round(max((one.ended - one.started for one in published), default=0.0), 3),
            wall_s=round(wall_s, 3),
            num_tokens=sum(len(completion.token_ids) for completion in completions),
        )

    def close(self) -> None:
        """End everything except the servers."""
        self._is_over.set()
        for trainer in self._trainers:
            trainer.close()
        for proxy in self._faults.proxies.values():
            self._loop.run(proxy.aclose())
        for task in self._tasks:
            task.cancel()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _trainer(self, incarnation: int | None) -> FleetTrainer:
        random_ = random.Random(self._random.random())
        directory = self._directory / f"trainer-{len(self._trainers)}"
        directory.mkdir()
        trainer = FleetTrainer(
            self._servers, self._faults, self.palette, self.frozen, self._settings, directory, random_, incarnation
        )
        self._trainers.append(trainer)
        return trainer

    def _train(self, trainer: FleetTrainer, num_versions: int, random_: random.Random, version: int) -> int:
        """Connect, and publish versions until the trainer dies or is fenced, at most ``num_versions``.

        Return the next version to publish.
        """
        if not trainer.connect():
            return version
        if trainer is not self._trainers[0]:
            self._faults.replaced.set()
        for _ in range(num_versions):
            for _attempt in range(random_.choice((1, 2))):
                is_published = trainer.publish(version)
                is_alone = len(self._trainers) == 1 and not self._faults.take_over.is_set()
                self._compare(trainer, is_alone=is_alone)
                if trainer.is_dead.is_set() or trainer.is_fenced:
                    return version + 1
                if is_published:
                    break
                trainer.react()
            version += 1
        return version

    def _challenge(self, first: FleetTrainer) -> None:
        """Take over from the first trainer without notifying it."""
        self._faults.take_over.wait()
        incarnation = None if first.publisher is not None else 2
        self._train(self._trainer(incarnation), 2, random.Random(self._plan.seed), self._first_version)

    def _compare(self, trainer: FleetTrainer, *, is_alone: bool) -> None:
        served = judge.served(self._servers, trainer.published[-1], is_alone=is_alone)
        self._problems += self._loop.run(served, _JUDGE_S * self._testbed.scale)

    def _bring_all_together(self) -> None:
        """Stop injecting faults, and check that a publish without faults updates every remaining server to one
        version."""
        deadline_s = self._final_s
        self._faults.stop()
        self._longest_pause_s = 3 * deadline_s
        self._faults.flush()
        for server in self._servers:
            self._loop.run(server.back(), self._testbed.start_s + _JUDGE_S)
        if all(server.is_gone for server in self._servers):
            return
        version = 1 + max(shade.version for shade in self.palette.shades)
        # The first publish may find a restarted server that has no group; the second then forms a new group. Or the
        # first may find that rank 1 has been lost; the second is then made by a new trainer.
        for _ in range(2):
            trainer = self._living_trainer()
            if trainer is None:
                self._problems.append("no trainer can connect anymore")
                return
            trainer.gather_all()
            if trainer.publish(version, deadline_s=deadline_s, quorum_is_all=True):
                break
        assert trainer is not None
        last = trainer.published[-1]
        if last.error is not None:
            self._problems.append(f"no clean publish succeeds anymore: {last.error}")
        self._compare(trainer, is_alone=True)
        self._problems += self._loop.run(judge.together(self._servers, last.shade), _JUDGE_S * self._testbed.scale)

    def _living_trainer(self) -> FleetTrainer | None:
        """Return the latest trainer or, if it has ended, its replacement; None if the replacement cannot connect."""
        latest = max(self._trainers, key=lambda t: t.incarnation)
        if latest.second_rank is not None and latest.second_rank.is_lost:
            latest.is_dead.set()
        if latest.publisher is not None and not latest.is_dead.is_set() and not latest.is_fenced:
            return latest
        trainer = self._trainer(None if latest.publisher is not None else 9)
        return trainer if trainer.connect(num_tries=5) else None

    def _end_clients(self) -> None:
        self._is_over.set()
        deadline = time.monotonic() + _END_S * self._testbed.scale
        for conversations, task in zip(self._conversations, self._tasks, strict=False):
            try:
                task.result(max(0.01, deadline - time.monotonic()))
            except TimeoutError:
                self._problems.append(f"request {len(conversations)} of a client does not end")
