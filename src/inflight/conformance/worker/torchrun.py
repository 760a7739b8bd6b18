"""Runs the checks inside of processes that torchrun has started: ranks go in step, and rank 0 collects the verdicts.

Nothing can be killed and started again here: a check that hangs is the last one, and every rank ends soon after it.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from inflight.conformance.checks import Check
from inflight.conformance.judge import judge, verdict_of
from inflight.conformance.targets import WorkerTarget
from inflight.conformance.verdicts import Outcome, Verdict, merged
from inflight.conformance.worker.ranks import Ranks
from inflight.conformance.worker.subject import WorkerSubject
from inflight.errors import ConfigError

_JOIN_TIMEOUT = timedelta(seconds=60)
_COLLECT_S = 10.0
"""For a verdict to arrive, after the deadline of its check."""
_END_S = 10.0
"""For rank 0 to show what it has, after a check that hung."""


def run_under_torchrun(
    target: WorkerTarget, checks: Sequence[Check], on_verdict: Callable[[Verdict], None]
) -> list[Verdict] | None:
    """Return all verdicts on rank 0, None on the others; every rank of torchrun's calls this.

    After a check that hung, rank 0 returns the verdicts until then and has ten seconds left; the other ranks do not
    return and end with status 1. Raises `ConfigError` if the ranks or their workers cannot be made.
    """
    subject = _join(target)
    verdicts: list[Verdict] = []
    for check in checks:
        verdicts.append(_verdict_of_all(subject, check))
        if subject.rank == 0:
            on_verdict(verdicts[-1])
        if verdicts[-1].outcome is Outcome.HUNG:
            _end_soon(subject)
            return verdicts
    subject.prepare()
    subject.ranks.meet()
    if subject.rank == 0:
        shutil.rmtree(subject.directory, ignore_errors=True)
    subject.close()
    return verdicts if subject.rank == 0 else None


def _join(target: WorkerTarget) -> WorkerSubject:
    """Return this rank's subject, with a directory that all ranks see."""
    store, rank, num_ranks = next(rendezvous("env://", timeout=_JOIN_TIMEOUT))
    ranks = Ranks(dist.PrefixStore("inflight-check/directory", store), rank, num_ranks)  # type: ignore[attr-defined]
    mine = tempfile.mkdtemp(prefix="inflight-check-") if rank == 0 else ""
    directory = Path(ranks.exchange(mine, _JOIN_TIMEOUT.total_seconds())[0])
    blind = [rank for rank, sees in enumerate(ranks.exchange(directory.is_dir())) if not sees]
    if blind:
        raise ConfigError(f"ranks {blind} do not see {directory} of rank 0; set TMPDIR to a directory that all share")
    return WorkerSubject.join(
        target.model_copy(update={"num_ranks": num_ranks}),
        directory,
        store=dist.PrefixStore("inflight-check/group", store),  # type: ignore[attr-defined]
        talk=dist.PrefixStore("inflight-check/talk", store),  # type: ignore[attr-defined]
        rank=rank,
        num_ranks=num_ranks,
    )


def _verdict_of_all(subject: WorkerSubject, check: Check) -> Verdict:
    """Return the verdict of all ranks, the same on each of them."""
    if check.before is not None or check.after is not None:
        reason = "it needs a group of one rank, too, which the kit makes when it starts the ranks itself"
        return verdict_of(check, Outcome.SKIPPED, message=reason)
    mine = judge(subject, check).verdict
    subject.ranks.post(check.id, mine.model_dump(mode="json"))
    deadline = time.monotonic() + check.deadline_s + _COLLECT_S
    verdicts = []
    for rank in range(subject.world_size):
        found = subject.ranks.read_post(check.id, rank, max(0.0, deadline - time.monotonic()))
        silent = verdict_of(check, Outcome.HUNG, message="it gave no verdict", stacks="none: it does not answer")
        verdicts.append(silent if found is None else Verdict.model_validate(found))
    return merged(verdicts)


def _end_soon(subject: WorkerSubject) -> None:
    """Return on rank 0, which ends in ten seconds at the latest; end the other ranks then."""
    if subject.rank == 0:
        shutil.rmtree(subject.directory, ignore_errors=True)
        # What hangs may hold up the end of the interpreter; this does not need it.
        faulthandler.dump_traceback_later(_END_S, exit=True, file=Path(os.devnull).open("w"))  # noqa: SIM115
        return
    time.sleep(_END_S)
    os._exit(1)
