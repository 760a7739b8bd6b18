"""Runs the checks in processes that torchrun started: ranks run in lockstep, and rank 0 collects the verdicts.

No process can be killed and restarted here: a check that hangs is the last one, and every rank ends soon after it.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from inflight.conformance.checks import Check
from inflight.conformance.judge import judge, verdict_of
from inflight.conformance.targets import WorkerTarget
from inflight.conformance.verdicts import CheckOutcome, Verdict, merged
from inflight.conformance.worker.ranks import Ranks
from inflight.conformance.worker.subject import WorkerSubject
from inflight.errors import ConfigError

_JOIN_TIMEOUT = timedelta(seconds=60)
_COLLECT_S = 10.0
"""How long a verdict may take to arrive after the deadline of its check."""
_END_S = 10.0
"""How long rank 0 may take to report its results after a check has hung."""


class TorchrunKit:
    """Checks a worker as `inflight.conformance.kit.Kit` does. Every rank creates a `TorchrunKit` and makes the same
    calls.

    Raises `ConfigError` if the ranks or their workers cannot be created.
    """

    gone = None
    start_seconds = 0.0

    def __init__(self, target: WorkerTarget, *, deadline_scale: float = 1.0) -> None:
        self.target = target
        self.is_over = False
        """Whether a check hung. If so, rank 0 has ten seconds left, and the other ranks end with status 1."""
        self._deadline_scale = deadline_scale
        self._subject = _join(target)

    def __enter__(self) -> TorchrunKit:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and not self.is_over:
            self._subject.prepare()
            self._subject.ranks.wait_for_all()
            if self._subject.rank == 0:
                shutil.rmtree(self._subject.directory, ignore_errors=True)
            self._subject.close()

    @property
    def facts(self) -> Mapping[str, Any]:
        flags = {**self._subject.facts["flags"], "launcher": "torchrun"}
        return {**self._subject.facts, "flags": flags}

    def run(self, check: Check) -> Verdict:
        """Return the verdict of all ranks on one check, the same on each of them."""
        verdict = _verdict_of_all(self._subject, replace(check, deadline_s=check.deadline_s * self._deadline_scale))
        if verdict.outcome is CheckOutcome.HUNG:
            self.is_over = True
            _end_soon(self._subject)
        return verdict


def _join(target: WorkerTarget) -> WorkerSubject:
    """Return this rank's subject, with a directory that all ranks can see."""
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
        exchange_store=dist.PrefixStore("inflight-check/exchange", store),  # type: ignore[attr-defined]
        rank=rank,
        num_ranks=num_ranks,
    )


def _verdict_of_all(subject: WorkerSubject, check: Check) -> Verdict:
    if check.before is not None or check.after is not None:
        reason = "it also needs a group of one rank, which the kit makes when it starts the ranks itself"
        return verdict_of(check, CheckOutcome.SKIPPED, message=reason)
    mine = judge(subject, check).verdict
    subject.ranks.post(check.id, mine.model_dump(mode="json"))
    deadline = time.monotonic() + check.deadline_s + _COLLECT_S
    verdicts = []
    for rank in range(subject.world_size):
        found = subject.ranks.read_post(check.id, rank, max(0.0, deadline - time.monotonic()))
        silent = verdict_of(
            check, CheckOutcome.HUNG, message="it returned no verdict", stacks="none: it does not answer"
        )
        verdicts.append(silent if found is None else Verdict.model_validate(found))
    return merged(verdicts)


def _end_soon(subject: WorkerSubject) -> None:
    """Return on rank 0, which ends within ten seconds; on every other rank, wait for that and then end the process."""
    if subject.rank == 0:
        shutil.rmtree(subject.directory, ignore_errors=True)
        # A hung call may block the interpreter's shutdown; this does not depend on it.
        faulthandler.dump_traceback_later(_END_S, exit=True, file=Path(os.devnull).open("w"))  # noqa: SIM115
        return
    time.sleep(_END_S)
    os._exit(1)
