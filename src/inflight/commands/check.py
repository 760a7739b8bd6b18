"""The command ``inflight check``, which imports the checks and torch only when it runs."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import aclosing, nullcontext, suppress
from pathlib import Path

from inflight.base.extensions import check_reference
from inflight.base.json_files import check_writable
from inflight.base.transport_registry import find_transport
from inflight.commands import check_fleet, check_parity
from inflight.commands.shared import add_deadline_scale, packages_of_extra, require_positive
from inflight.conformance.arguments import add_endpoint_arguments, endpoint_of, worker_factory
from inflight.conformance.checks import LEVELS, Check, Kind, require_levels, select
from inflight.conformance.compare import compare, comparison_text
from inflight.conformance.expected import load_expected
from inflight.conformance.report.files import REPORTS, read_certificate, write_reports
from inflight.conformance.targets import EndpointTarget, Target, TransportTarget, WorkerTarget
from inflight.engines.factories import keyword_arguments
from inflight.errors import ConfigError, DeadlineError, InflightError, UnauthorizedError
from inflight.http.kinds import connect_endpoint
from inflight.wire import UpdateRef


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = "Check an implementation against the contract. Exit status: 0 if it conforms, 1 if not."
    parser.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("OLD.json", "NEW.json"),
        help="instead, show the differences between two certificates; exit status 1 if a check regressed",
    )
    kinds = parser.add_subparsers(dest="kind", metavar="KIND")
    endpoint = kinds.add_parser(
        "endpoint",
        parents=[_shared_arguments("endpoint")],
        help="check an inference server, or an engine in this process",
        description="Check an inference server, or an engine in this process.",
    )
    add_endpoint_arguments(endpoint)

    worker = kinds.add_parser(
        "worker",
        parents=[_shared_arguments("worker")],
        help="check a trainer worker; under torchrun, on all of its ranks",
        description="Check a trainer worker. Under torchrun, check it on all ranks that torchrun started.",
    )
    worker.add_argument(
        "target", nargs="?", metavar="TARGET", help="module:attribute, or an installed worker such as fsdp"
    )
    worker.add_argument("--ranks", type=int, metavar="N", help="ranks to start (default: 1)")
    worker.add_argument(
        "--ranks-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option that applies only with several ranks, such as tensor_parallel=2; may be repeated",
    )
    worker.add_argument("--experts", action="store_true", help="use a mixture-of-experts model for the checks")

    transport = kinds.add_parser(
        "transport",
        parents=[_shared_arguments("transport")],
        help="check a weight transport",
        description="Check a weight transport.",
    )
    transport.add_argument(
        "target", nargs="?", metavar="TARGET", help="an installed transport such as gloo, or module:attribute"
    )

    check_fleet.add_arguments(
        kinds.add_parser("fleet", help="check a fleet of servers under faults while trainers publish to it")
    )
    check_parity.add_arguments(
        kinds.add_parser("parity", help="measure and explain logprob differences between an engine and a trainer")
    )


def run(arguments: argparse.Namespace) -> int:
    """Check the target, list the checks or compare two certificates."""
    if arguments.compare:
        if arguments.kind:
            raise ConfigError(f"--compare does not run checks; omit {arguments.kind!r}")
        return _compare(*arguments.compare)
    if not arguments.kind:
        raise ConfigError("specify what to check: inflight check endpoint, worker, transport, fleet or parity")
    if arguments.kind in ("fleet", "parity"):
        require_positive(arguments, "deadline_scale")
        return check_fleet.run(arguments) if arguments.kind == "fleet" else check_parity.run(arguments)
    require_levels(arguments.kind, arguments.level)
    return _list(arguments) if arguments.list else _check(arguments)


def target_of(arguments: argparse.Namespace) -> Target:
    """Return the target that these arguments describe. Raises `ConfigError`."""
    options = keyword_arguments(arguments.option, "--option")
    if arguments.kind == "endpoint":
        return endpoint_of(arguments, options)
    if arguments.target is None:
        raise ConfigError(f"specify which {arguments.kind} to check; see inflight check {arguments.kind} --help")
    if arguments.kind == "worker":
        of_ranks = keyword_arguments(arguments.ranks_option, "--ranks-option")
        if (path := (options | of_ranks).get("model_path")) is not None:
            raise ConfigError(
                f"option model_path is {path!r}, but the worker checks create their own models, for which they compute "
                "the expected logprobs and gradients: remove this option"
            )
        return WorkerTarget(
            factory=worker_factory(arguments.target),
            num_ranks=_num_ranks(arguments.ranks),
            options=options,
            options_of_ranks=of_ranks,
            experts=arguments.experts,
        )
    if ":" in arguments.target:
        check_reference(arguments.target)
    else:
        find_transport(arguments.target)
    return TransportTarget(factory=arguments.target, options=options)


def _shared_arguments(kind: Kind) -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option for the factory; may be repeated; VALUE is parsed as JSON if possible, otherwise it is a string",
    )
    shared.add_argument(
        "--check", action="append", default=[], metavar="ID", help="run only this check; may be repeated"
    )
    shared.add_argument(
        "--level",
        action="append",
        nargs="?",
        const="",
        default=[],
        metavar="NAME",
        help=f"run only this level; may be repeated; the levels are {', '.join(LEVELS[kind])}",
    )
    shared.add_argument("--list", action="store_true", help="list the checks without running them")
    shared.add_argument(
        "--expected-failures",
        type=Path,
        metavar="FILE",
        help='TOML file of checks that are expected to fail, one per line, such as E-12 = "reason"',
    )
    add_deadline_scale(shared)
    for report in REPORTS:
        shared.add_argument(f"--{report.name}", type=Path, metavar="FILE", help=f"write {report.what}")
    return shared


def _list(arguments: argparse.Namespace) -> int:
    checks = select(_load_checks(arguments.kind), arguments.check, arguments.level)

    from inflight.conformance.report.terminal import open_console, print_list

    print_list(open_console(), checks)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    target = target_of(arguments)
    require_positive(arguments, "deadline_scale")
    scale = arguments.deadline_scale
    files = {report.name: file for report in REPORTS if (file := getattr(arguments, report.name)) is not None}
    check_writable(files)
    if isinstance(target, EndpointTarget) and target.url is not None:
        asyncio.run(_attach(target.url, target.token, publishes=target.model is not None))
    known = _load_checks(arguments.kind)
    checks = select(known, arguments.check, arguments.level)
    expected = load_expected(arguments.expected_failures, known) if arguments.expected_failures else {}

    from inflight.conformance.kit import Kit
    from inflight.conformance.report.terminal import open_console, print_certificate, progress
    from inflight.conformance.suite import run_suite

    console = open_console()
    kit: Kit | TorchrunKit
    if isinstance(target, WorkerTarget) and _torchrun_ranks() is not None:
        from inflight.conformance.worker.torchrun import TorchrunKit

        kit, is_shown = TorchrunKit(target, deadline_scale=scale), os.environ["RANK"] == "0"
    else:
        kit, is_shown = Kit(target, deadline_scale=scale), True
    with kit, progress(console, checks) if is_shown else nullcontext(lambda verdict: None) as on_verdict:
        certificate = run_suite(kit, checks, expected=expected, on_verdict=on_verdict)
    status = 0
    if is_shown:
        print_certificate(console, certificate)
        write_reports(certificate, files)
        status = 0 if certificate.conforms else 1
    if _torchrun_ranks() is not None:  # threads that wait in gloo would abort an interpreter that exits normally
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


async def _attach(url: str, token: str | None, *, publishes: bool) -> None:
    """Attach to a server once, so that a refusal is reported before anything is loaded."""
    endpoint = connect_endpoint(url, token=token, control_timeout_s=10.0)
    async with aclosing(endpoint):
        with suppress(DeadlineError):  # the kit reports and explains it later
            await endpoint.capabilities()
        if publishes:
            try:
                await endpoint.abort_weight_update(UpdateRef(version=1, run_id="inflight-check"))
            except UnauthorizedError:
                raise
            except InflightError:  # nothing to abort, or a fault that a check finds
                return


def _compare(old: Path, new: Path) -> int:
    comparison = compare(read_certificate(old), read_certificate(new))
    print(comparison_text(comparison), end="")
    return 1 if comparison.is_worse else 0


def _load_checks(kind: str) -> Sequence[Check]:
    with packages_of_extra("conformance"):
        import rich  # noqa: F401 - imported first, so that no check has run if it is missing

        from inflight.conformance.child import checks_of

        return checks_of(kind)


def _num_ranks(given: int | None) -> int:
    launched = _torchrun_ranks()
    if given is not None and given < 1:
        raise ConfigError(f"--ranks must be at least 1, not {given}")
    if given is not None and launched is not None and given != launched:
        raise ConfigError(f"--ranks {given}, but torchrun started {launched}; leave --ranks out")
    return given or launched or 1


def _torchrun_ranks() -> int | None:
    """Return the number of ranks that torchrun started, or None if it did not start this process."""
    text = os.environ.get("WORLD_SIZE")
    if text is None or "RANK" not in os.environ:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"$WORLD_SIZE is {text!r}, not a number; unset it, or start with torchrun") from None
