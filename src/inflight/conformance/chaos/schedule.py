"""One schedule: three embedded servers that are kept busy, a trainer or two that publish, and faults; then the judge.

What is judged is said in `inflight.conformance.chaos.judge`.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inflight.conformance.chaos import judge
from inflight.conformance.chaos.clients import Client
from inflight.conformance.chaos.faults import Faults, FaultyEndpoint, TrainerLife
from inflight.conformance.chaos.palette import Palette, make_checkpoint
from inflight.conformance.chaos.plan import TRANSPORTS, Fault, FaultPlan, Kind, Transport, fault_plan
from inflight.conformance.chaos.servers import EmbeddedServer, Fleet
from inflight.conformance.chaos.trainer import Manner, Trainer

NUM_SERVERS = 3
_END_S = 15.0
"""How long clients may take to end their last request."""
_FINAL_DEADLINE_S = 10.0
_HOLD_SLACK_S = 3.0  # of a machine that is busy with other schedules


@dataclass(frozen=True, slots=True)
class ScheduleResult:
    """What came of one schedule. ``problems`` is empty if all held that must."""

    plan: FaultPlan
    manner: Manner
    struck: tuple[Fault, ...]
    outcomes: tuple[str, ...]
    """Per publish ``returned``, or the name of what it raised; with each endpoint's outcome after it."""
    problems: tuple[str, ...]
    slowest_publish_s: float
    wall_s: float
    num_tokens: int


class Ground:
    """What schedules of one process share: the fleet's loop, the model, a directory. Use as a context manager."""

    def __init__(self) -> None:
        from inflight.checkpoints import load_causal_lm
        from inflight.local.slots import ATTENTION_NAME, register_slot_attention

        register_slot_attention()
        self.directory = Path(tempfile.mkdtemp(prefix="inflight-chaos-"))
        checkpoint = make_checkpoint(self.directory / "checkpoint")
        self.template: Any = load_causal_lm(checkpoint, attention=ATTENTION_NAME, device=torch.device("cpu"))
        self.fleet = Fleet()

    def __enter__(self) -> Ground:
        return self

    def __exit__(self, *_: object) -> None:
        self.fleet.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def run_schedule(seed: int, ground: Ground, transport: Transport | None = None) -> ScheduleResult:
    """Run the schedule of a seed and judge it. ``transport`` None takes the seed's own."""
    random_ = random.Random(f"schedule {seed} {transport}")
    transport = transport or TRANSPORTS[seed % len(TRANSPORTS)]
    deadline_s = random_.choice((0.5, 0.8))
    plan = fault_plan(seed, NUM_SERVERS, transport, deadline_s)
    manner = Manner.drawn(random_, transport, NUM_SERVERS, deadline_s)
    schedule = _Schedule(ground, plan, manner, random_)
    started = time.monotonic()
    try:
        schedule.run()
    finally:
        schedule.close()
    return schedule.result(time.monotonic() - started)


class _Schedule:
    """One schedule under way."""

    def __init__(self, ground: Ground, plan: FaultPlan, manner: Manner, random_: random.Random) -> None:
        self._fleet = ground.fleet
        self._plan = plan
        self._manner = manner
        self._random = random_
        self._directory = Path(tempfile.mkdtemp(dir=ground.directory))
        named = dict(ground.template.named_parameters())
        frozen = tuple(list(named)[:2]) if random_.random() < 0.2 else ()
        self._palette = Palette(named, plan.seed, frozen)
        lease_s = manner.deadline_s + 0.4
        self._faults = Faults(plan, self._fleet, lease_s, cancel_arrives=random_.random() < 0.5)
        longest_hold_s = manner.deadline_s + lease_s + _HOLD_SLACK_S
        self._servers = [
            EmbeddedServer(f"server-{i}", ground.template, self._palette, longest_hold_s) for i in range(NUM_SERVERS)
        ]
        self._trainers: list[Trainer] = []
        self._clients: list[Client] = []
        self._conversing: list[Future[None]] = []
        self._problems: list[str] = []

    def run(self) -> None:
        """Run it to its end."""
        for server in self._servers:
            self._fleet.run(server.start())
        for i, server in enumerate(self._servers):
            endpoint = FaultyEndpoint(server, i, self._faults, TrainerLife())
            self._clients.append(Client(endpoint, server, i, random.Random(self._random.random())))
        self._conversing = [self._fleet.start(client.run()) for client in self._clients]
        first = self._trainer(None)
        is_challenged = any(fault.kind is Kind.TAKE_OVER for fault in self._plan.faults)
        challenger = threading.Thread(target=self._challenge, args=(first,), daemon=True)
        if is_challenged:
            challenger.start()
        last = self._train(first, self._random.randint(2, 3), random.Random(self._random.random()))
        if is_challenged:
            self._faults.take_over.set()
            challenger.join(_END_S + 20 * self._manner.deadline_s)
            if challenger.is_alive():
                self._problems.append("the trainer that took over hangs")
        elif first.life.is_dead:
            second = self._trainer(None)
            last = self._train(second, 2, random.Random(self._random.random()), first_version=last)
        self._bring_all_together()
        self._end_clients()

    def result(self, wall_s: float) -> ScheduleResult:
        """Judge it."""
        published = [one for trainer in self._trainers for one in trainer.published]
        problems = [*self._problems]
        for trainer in self._trainers:
            problems += trainer.problems
        problems += judge.publishes(self._trainers, self._servers)
        problems += judge.lives(self._servers)
        problems += judge.conversations([c for client in self._clients for c in client.conversations], self._palette)
        return ScheduleResult(
            plan=self._plan,
            manner=self._manner,
            struck=tuple(self._faults.struck),
            outcomes=tuple(judge.outcome(one) for one in published),
            problems=tuple(dict.fromkeys(problems)),
            slowest_publish_s=max((one.ended - one.started for one in published), default=0.0),
            wall_s=wall_s,
            num_tokens=sum(
                len(completion.token_ids)
                for client in self._clients
                for conversation in client.conversations
                if conversation.response is not None
                for completion in conversation.response.completions
            ),
        )

    def close(self) -> None:
        """End everything."""
        for client in self._clients:
            client.stop()
        for trainer in self._trainers:
            trainer.close()
        for proxy in self._faults.proxies.values():
            self._fleet.run(proxy.aclose())
        for server in self._servers:
            self._fleet.run(server.aclose())
        for future in self._conversing:
            future.cancel()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _trainer(self, epoch: int | None) -> Trainer:
        random_ = random.Random(self._random.random())
        directory = self._directory / f"trainer-{len(self._trainers)}"
        directory.mkdir()
        trainer = Trainer(self._servers, self._faults, self._palette, self._manner, directory, random_, epoch)
        self._trainers.append(trainer)
        return trainer

    def _train(self, trainer: Trainer, num_versions: int, random_: random.Random, first_version: int = 1) -> int:
        """Connect, and publish some versions as long as the trainer may; return the next version."""
        version = first_version
        if not trainer.connect():
            return version
        for _ in range(num_versions):
            for _attempt in range(random_.choice((1, 2))):
                is_published = trainer.publish(version)
                self._check(trainer)
                if trainer.life.is_dead or trainer.is_fenced:
                    return version + 1
                if is_published:
                    break
                trainer.react()
            version += 1
        return version

    def _challenge(self, first: Trainer) -> None:
        """Take over from the first trainer, which does not know."""
        self._faults.take_over.wait()
        is_seen = first.publisher is not None
        self._train(self._trainer(None if is_seen else 2), 2, random.Random(self._plan.seed))

    def _check(self, trainer: Trainer) -> None:
        """Compare what a publish said with what is true."""
        is_alone = len(self._trainers) == 1 and not self._faults.take_over.is_set()
        self._problems += self._fleet.run(judge.served(self._servers, trainer.published[-1], is_alone=is_alone))

    def _bring_all_together(self) -> None:
        """Nothing strikes any more: one clean publish brings every server that is not gone to one version."""
        self._faults.stop()
        for server in self._servers:
            server.longest_hold_s = 3 * _FINAL_DEADLINE_S
        self._faults.flush()
        for server in self._servers:
            self._fleet.run(server.back())
        if all(server.is_gone for server in self._servers):
            return
        trainer = max(self._trainers, key=lambda t: t.epoch)
        if trainer.publisher is None or trainer.life.is_dead or trainer.is_fenced:
            trainer = self._trainer(None if trainer.publisher is not None else 9)
            if not trainer.connect(num_tries=5):
                self._problems.append("no trainer can connect any more")
                return
        trainer.gather_all()
        version = 1 + max((one.shade.version for t in self._trainers for one in t.published), default=0)
        # The first may find that a server came back without its group, which the next one forms anew.
        if not any(trainer.publish(version, deadline_s=_FINAL_DEADLINE_S, quorum_is_all=True) for _ in range(2)):
            self._problems.append(f"no clean publish succeeds any more: {trainer.published[-1].error}")
        self._problems += self._fleet.run(judge.served(self._servers, trainer.published[-1], is_alone=True))
        self._problems += self._fleet.run(judge.together(self._servers, trainer.published[-1].shade))

    def _end_clients(self) -> None:
        for client in self._clients:
            client.stop()
        deadline = time.monotonic() + _END_S
        for client, future in zip(self._clients, self._conversing, strict=True):
            try:
                future.result(max(0.01, deadline - time.monotonic()))
            except TimeoutError:
                self._problems.append(f"request {len(client.conversations)} of a client does not end")
