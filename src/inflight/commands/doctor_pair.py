"""The part of ``inflight doctor`` that examines a live pair of an endpoint and a trainer."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import signal
import sys
import time
from typing import Any

from inflight.base.json_files import check_writable, write_json
from inflight.base.printable import printable
from inflight.commands.shared import print_progress
from inflight.conformance.arguments import endpoint_of
from inflight.engines.factories import keyword_arguments
from inflight.errors import ConfigError, DeadlineError

_START_S = 120.0
_EXAMINE_S = 1200.0


def run(arguments: argparse.Namespace) -> int:
    """Examine the pair, and print the findings; return 1 if a cause was found."""
    target = endpoint_of(arguments, keyword_arguments(arguments.option, "--option"))
    if target.url is not None and target.model is None:
        raise ConfigError("specify the checkpoint that the URL serves with --model DIR")
    check_writable({"json": arguments.json})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a server that it started ends with this process
    return asyncio.run(_examined(target, arguments))


async def _examined(target: Any, arguments: argparse.Namespace) -> int:
    from inflight.conformance.parity.opening import open_pair
    from inflight.doctor.causes import diagnose
    from inflight.doctor.experiments import examine

    started, scale = time.monotonic(), arguments.deadline_scale
    options = keyword_arguments(arguments.worker_option, "--worker-option")
    opening = open_pair(
        target,
        options,
        prompts=arguments.prompts,
        tokens=arguments.tokens,
        start_s=_START_S * scale,
        report=print_progress,
    )
    async with opening as pair:
        try:
            async with asyncio.timeout(_EXAMINE_S * scale):
                found = await examine(pair, print_progress)
        except TimeoutError as error:
            words = f"the examination did not end within {_EXAMINE_S * scale:g} s; allow more time with"
            raise DeadlineError(f"{words} --deadline-scale", target.label) from error
        can = pair.subject.capabilities
    findings = diagnose(found)
    trainer = target.worker or "transformers in float32"
    print(printable(f"{can.engine} {can.engine_version} in {can.dtype}, compared with {trainer}"))
    same = found.same.same_weights
    print(
        f"With the same weights, {same.num_tokens} tokens differ by {same.mean:.2g} nats on average "
        f"(k3 {same.k3:.2g}, largest {same.largest:.2g})."
    )
    if not findings:
        print("No cause of drift was found: the pair is healthy.")
    for finding in findings:
        where = f" ({finding.where})" if finding.where else ""
        print(f"Cause {finding.cause.number}: {finding.cause.name}{where}.")
        print(f"  evidence: {finding.evidence}")
        print(f"  fix: {finding.cause.fix}")
    print(f"Examined in {time.monotonic() - started:.0f} s.", flush=True)
    row = {"findings": [dataclasses.asdict(it) for it in findings], "examination": dataclasses.asdict(found)}
    write_json(arguments.json, row)
    return 1 if findings else 0
