"""The command ``inflight replay``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from inflight.base.json_files import check_writable, write_json
from inflight.base.toml import read_toml
from inflight.commands.shared import add_json_argument, print_progress, require_at_least
from inflight.engines.factories import keyword_arguments
from inflight.errors import ConfigError
from inflight.http.tokens import TOKEN_VARIABLE

if TYPE_CHECKING:
    from inflight.replay.training import ReplayedIncarnation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Repeat the recorded training of a run, without engines, and report the differences. Exit status: 0 if all "
        "differences are within rounding, 1 otherwise."
    )
    parser.add_argument("record", type=Path, metavar="RUN_DIR_OR_RECORD", help="run directory, or the record in it")
    parser.add_argument(
        "--trainer", help="trainer to use: fsdp, torchtitan, deepspeed, megatron, ... (default: the run's)"
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="number of trainer ranks (default: the run's)")
    parser.add_argument(
        "--trainer-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="trainer option, as in train.trainer_options; may be repeated",
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="model directory with the initial weights, if it has moved"
    )
    parser.add_argument("--config", type=Path, metavar="RUN.toml", help="run configuration for an imported record")
    parser.add_argument("--steps", type=int, metavar="N", help="train the first N steps only")
    parser.add_argument(
        "--to",
        type=Path,
        metavar="DIR",
        help="directory for the logs and the final weights (default: they are deleted)",
    )
    parser.add_argument(
        "--engine",
        metavar="URL",
        help="repeat the sampling on this server, which serves --version; vllm+http://... is vLLM's own API",
    )
    parser.add_argument(
        "--version", type=int, default=0, metavar="N", help="recorded version that the server serves (default: 0)"
    )
    parser.add_argument(
        "--groups", type=int, default=16, metavar="N", help="number of requests to repeat (default: %(default)s)"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-3,
        metavar="NATS",
        help="largest logprob difference that is not reported (default: %(default)s)",
    )
    add_json_argument(parser, "the report")


def run(arguments: argparse.Namespace) -> int:
    """Repeat the training or the sampling and print the report; return 1 if something differs."""
    from inflight.observe.trace.records import MANIFEST, RECORD, read_manifest, record_of
    from inflight.replay.report import as_json, described, first_beyond_rounding
    from inflight.replay.training import replay_incarnations, replay_training

    require_at_least(arguments, ranks=1, steps=1, groups=1)
    record = record_of(arguments.record)
    manifest = read_manifest(record)

    if arguments.to is not None and any((arguments.to / name).exists() for name in (MANIFEST, RECORD, "config.json")):
        raise ConfigError(f"{str(arguments.to)!r} contains a run or a record: choose another directory with --to")
    check_writable({"json": arguments.json})

    def make(directory: Path) -> list[ReplayedIncarnation]:
        return replay_incarnations(
            manifest,
            directory,
            base=None if arguments.config is None else read_toml(arguments.config, "configuration"),
            model=arguments.model,
            trainer=arguments.trainer,
            num_ranks=arguments.ranks,
            options=keyword_arguments(arguments.trainer_option, "--trainer-option"),
        )

    if arguments.engine is not None:
        return _sample_again(arguments, record, make(record))
    replayed = replay_training(
        record,
        make,
        arguments.to,
        num_steps=arguments.steps,
        note=print_progress,
        on_step=lambda step: print_progress(f"step to version {step.version}: gradient norm {step.gradient_norm:.6g}"),
    )
    print(described(replayed))
    write_json(arguments.json, as_json(replayed))
    return int(first_beyond_rounding(replayed) is not None)


def _sample_again(arguments: argparse.Namespace, record: Path, incarnations: Sequence[ReplayedIncarnation]) -> int:
    """Print where an endpoint's samples differ from the record; return 1 if any differ."""
    from inflight.http.kinds import connect_endpoint
    from inflight.model.checkpoints import load_tokenizer
    from inflight.replay.report import described_sampling
    from inflight.replay.sampling import replay_sampling

    config = next(it.config for it in incarnations if it.until is None or arguments.version < it.until)
    endpoint = connect_endpoint(arguments.engine, token=os.environ.get(TOKEN_VARIABLE))
    found = replay_sampling(
        record, config, endpoint, version=arguments.version, num_groups=arguments.groups, tolerance=arguments.tolerance
    )
    tokenizer = load_tokenizer(config.model.path) if config.model.path.is_dir() else None
    decode = (lambda token_ids: "") if tokenizer is None else tokenizer.decode
    print(described_sampling(found, arguments.tolerance, decode))
    write_json(arguments.json, asdict(found))
    parts = any(it.parts_at is not None or it.parts_by_logprob_at is not None for it in found.sampled)
    return int(parts or any(it.differs_at is not None for it in found.scored))
