"""A campaign over embedded servers, in several processes."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from inflight.conformance.fleet.campaign import ScheduleResult, summary, text_of
from inflight.conformance.fleet.plan import INSIDE, TRANSPORTS, Transport

SCHEDULE_LIMIT_S = 600.0
"""A campaign in which no schedule ends for this many seconds counts as hung and fails."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """The schedules to run: ``num_schedules`` from ``seed`` on. ``transport`` None: each seed determines its own."""

    num_schedules: int
    seed: int = 0
    transport: Transport | None = None
    num_processes: int = 1
    num_senders: int = 1
    deadline_scale: float = 1.0

    def seeds(self, number: int) -> range:
        """Return the seeds that process ``number`` runs, in their order."""
        return range(self.seed + number, self.seed + self.num_schedules, self.num_processes)


Work = Callable[[Campaign, int, Connection], None]


def work(campaign: Campaign, number: int, results: Connection) -> None:
    """Run the schedules of one process, and send the result of each."""
    quiet = os.open(os.devnull, os.O_WRONLY)  # hides what torch and uvicorn print about cut connections
    os.dup2(quiet, 2)
    import torch

    from inflight.conformance.fleet.schedule import judged
    from tests.chaos.embedded import EmbeddedTestbed

    torch.set_num_threads(1)
    with EmbeddedTestbed(campaign.deadline_scale) as testbed:
        for seed in campaign.seeds(number):
            results.send(judged(seed, testbed, campaign.transport, campaign.num_senders))
    results.close()
    os._exit(0)  # threads that a fault left behind must not keep the process alive


def results_of(campaign: Campaign, work: Work = work) -> Iterator[ScheduleResult]:
    """Yield the result of each schedule as it ends, in any process. Raises ``TimeoutError`` if one hangs.

    A process that dies fails the schedule that it was running, and its later schedules are not run.
    """
    spawn = multiprocessing.get_context("spawn")
    processes, seeds = {}, {}
    for number in range(min(campaign.num_processes, campaign.num_schedules)):
        here, there = spawn.Pipe(duplex=False)
        processes[here] = spawn.Process(target=work, args=(campaign, number, there))
        processes[here].start()
        there.close()
        seeds[here] = iter(campaign.seeds(number))
    try:
        while seeds:
            ready = wait(list(seeds), SCHEDULE_LIMIT_S)
            if not ready:
                raise TimeoutError(f"no schedule ended within {SCHEDULE_LIMIT_S:g} s")
            for here in ready:
                assert isinstance(here, Connection)
                try:
                    result = here.recv()
                except EOFError:
                    processes[here].join()
                    unfinished = next(seeds.pop(here), None)
                    if unfinished is not None:
                        transport = campaign.transport or TRANSPORTS[unfinished % len(TRANSPORTS)]
                        died = f"the process of this schedule ended with status {processes[here].exitcode}"
                        yield ScheduleResult(unfinished, transport, f"seed {unfinished}", problems=(died,))
                else:
                    next(seeds[here])
                    yield result
    finally:
        for process in processes.values():
            process.kill()
            process.join()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign; return 0 if every schedule passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--schedules", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first schedule")
    parser.add_argument("--transport", choices=TRANSPORTS)
    parser.add_argument("--senders", type=int, default=1, choices=(1, 2), help="trainer ranks that send weights")
    parser.add_argument("--deadline-scale", type=float, default=1.0, help="factor on every deadline")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file to which the statistics are written")
    options = parser.parse_args(arguments)
    campaign = Campaign(
        options.schedules,
        options.seed,
        options.transport,
        options.processes,
        options.senders,
        options.deadline_scale,
    )
    started, found, num_failed = time.monotonic(), [], 0
    os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for result in results_of(campaign):
            found.append(result)
            num_failed += bool(result.problems)
            for problem in result.problems:
                print(f"{result.plan}: {problem}", file=sys.stderr)
            if len(found) % 10 == 0 or result.problems or len(found) == campaign.num_schedules:
                each_s = (time.monotonic() - started) / len(found)
                counts = f"{len(found)} of {campaign.num_schedules} schedules, {num_failed} failed, {each_s:.2f} s each"
                print(counts, file=sys.stderr, flush=True)
    finally:  # an interrupted campaign also prints its figures
        figures = summary(found, INSIDE, time.monotonic() - started, options.senders)
        if options.json is not None:
            options.json.write_text(json.dumps(figures, indent=2) + "\n")
        again = f"python -m tests.chaos --senders {options.senders} --deadline-scale {options.deadline_scale:g}"
        print(text_of(figures, again if options.transport is None else f"{again} --transport {options.transport}"))
    return 0 if len(found) == campaign.num_schedules and not figures["failed"] else 1
