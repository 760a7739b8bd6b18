"""The commands ``inflight replay`` and ``inflight import``. Loads torch only when run."""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inflight.engines.factories import keyword_arguments
from inflight.errors import ConfigError


def add_parser(commands: Any) -> None:
    """Add ``replay`` to the commands of ``inflight``."""
    replay = commands.add_parser(
        "replay",
        help="train or sample again what a run recorded",
        description="Train again from the record of a run, without engines, and tell where it differs. Exit status: 0 "
        "nothing differs by more than rounding, 1 something does.",
    )
    replay.add_argument("record", type=Path, metavar="RUN_DIR_OR_RECORD")
    replay.add_argument("--trainer", help="fsdp, torchtitan, deepspeed or another (default: the run's)")
    replay.add_argument("--ranks", type=int, metavar="N", help="trainer ranks (default: the run's)")
    replay.add_argument(
        "--trainer-option", action="append", default=[], metavar="KEY=VALUE", help="as in train.trainer_options"
    )
    replay.add_argument("--model", type=Path, metavar="DIR", help="where the start weights are now")
    replay.add_argument("--config", type=Path, metavar="RUN.toml", help="for an imported record, which has none")
    replay.add_argument("--steps", type=int, metavar="N", help="train the first N steps only")
    replay.add_argument("--to", type=Path, metavar="DIR", help="keep the logs and the final weights here")
    replay.add_argument("--json", type=Path, metavar="FILE", help="also write the report to this file")
    replay.set_defaults(call=_replay)


def _replay(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    from inflight.pipeline.config import RunConfig
    from inflight.replay.report import as_json, described, first_beyond_rounding
    from inflight.replay.training import replay_config, replay_training
    from inflight.trace.records import read_manifest, record_of

    for name in ("ranks", "steps"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, not {value}")
    record = record_of(arguments.record)
    manifest = read_manifest(record)

    def make(directory: Path) -> RunConfig:
        return replay_config(
            manifest,
            directory,
            base=None if arguments.config is None else _toml(arguments.config),
            model=arguments.model,
            trainer=arguments.trainer,
            num_ranks=arguments.ranks,
            options=keyword_arguments(arguments.trainer_option, "--trainer-option"),
        )

    replayed = replay_training(
        record,
        make,
        arguments.to,
        num_steps=arguments.steps,
        note=_say,
        on_step=lambda step: _say(f"step to version {step.version}: gradient norm {step.gradient_norm:.6g}"),
    )
    print(described(replayed))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(replayed), indent=2) + "\n")
    return int(first_beyond_rounding(replayed) is not None)


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"configuration {str(path)!r} cannot be read: {error}") from error


def _say(line: str) -> None:
    print(f"inflight: {line}", file=sys.stderr, flush=True)
