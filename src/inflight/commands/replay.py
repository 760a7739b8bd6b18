"""The commands ``inflight replay`` and ``inflight import``. Loads torch only when run."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from inflight.base.toml import read_toml
from inflight.engines.factories import keyword_arguments
from inflight.errors import ConfigError
from inflight.http.tokens import TOKEN_VARIABLE
from inflight.rollouts import AdvantageEstimator

if TYPE_CHECKING:
    from inflight.replay.training import Life


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
    replay.add_argument(
        "--engine",
        metavar="URL",
        help="sample again on this server instead, which serves the start weights; vllm+http://... for an engine's own",
    )
    replay.add_argument(
        "--version", type=int, default=0, metavar="N", help="the recorded version that the server has (default: 0)"
    )
    replay.add_argument(
        "--groups", type=int, default=16, metavar="N", help="requests to sample again (default: %(default)s)"
    )
    replay.add_argument(
        "--tolerance",
        type=float,
        default=1e-3,
        metavar="NATS",
        help="largest difference of a logprob that is not told (default: %(default)s)",
    )
    replay.add_argument("--json", type=Path, metavar="FILE", help="also write the report to this file")
    replay.set_defaults(call=_replay)
    _add_import(commands)


def _add_import(commands: Any) -> None:
    imports = commands.add_parser("import", help="make a record of the rollouts that another framework stored")
    sources = imports.add_subparsers(dest="source", required=True, metavar="FRAMEWORK")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("files", type=Path, nargs="+", metavar="FILE", help="each is one step")
    shared.add_argument("--to", type=Path, required=True, metavar="DIR", help="where to write the record")
    shared.add_argument(
        "--advantages", choices=get_args(AdvantageEstimator), default="std", help="default: %(default)s"
    )
    shared.add_argument("--temperature", type=float, default=1.0, help="of the sampling (default: %(default)s)")
    slime = sources.add_parser("slime", parents=[shared], help="files of slime's --save-debug-rollout-data")
    slime.add_argument("--reward-key", metavar="KEY", help="which of several rewards to take")
    verl = sources.add_parser("verl", parents=[shared], help="files of verl's trainer.rollout_data_dir")
    verl.add_argument("--tokenizer", type=Path, required=True, metavar="DIR", help="the model directory of the run")
    imports.set_defaults(call=_import)


def _import(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    from inflight.replay.importing import write_imported

    if not arguments.temperature > 0:
        raise ConfigError(f"--temperature must be above 0, not {arguments.temperature:g}")
    if arguments.source == "slime":
        from inflight.replay.slime import read_slime

        found = read_slime(arguments.files, temperature=arguments.temperature, reward_key=arguments.reward_key)
    else:
        from inflight.replay.verl import read_verl

        found = read_verl(arguments.files, tokenizer=arguments.tokenizer, temperature=arguments.temperature)
    manifest = write_imported(
        found, arguments.to, source=arguments.source, advantages=arguments.advantages, files=arguments.files
    )
    number = len(arguments.files)
    print(f"wrote {number} step{'s' * (number != 1)} to {arguments.to}")
    for note in (*(f"it lacks {what}" for what in manifest.lacks), *manifest.notes):
        print(f"  {note}")
    return 0


def _replay(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    from inflight.observe.trace.records import MANIFEST, RECORD, read_manifest, record_of
    from inflight.replay.report import as_json, described, first_beyond_rounding
    from inflight.replay.training import replay_lives, replay_training

    for name in ("ranks", "steps", "groups"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, not {value}")
    record = record_of(arguments.record)
    manifest = read_manifest(record)

    if arguments.to is not None and any((arguments.to / name).exists() for name in (MANIFEST, RECORD, "config.json")):
        raise ConfigError(f"{str(arguments.to)!r} is the directory of a run or a record: choose another with --to")
    if arguments.json is not None and not arguments.json.parent.is_dir():
        raise ConfigError(f"--json {str(arguments.json)!r} is in no directory: make {str(arguments.json.parent)!r}")

    def make(directory: Path) -> list[Life]:
        return replay_lives(
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
        note=_say,
        on_step=lambda step: _say(f"step to version {step.version}: gradient norm {step.gradient_norm:.6g}"),
    )
    print(described(replayed))
    if arguments.json is not None:
        _write_json(arguments.json, as_json(replayed))
    return int(first_beyond_rounding(replayed) is not None)


def _sample_again(arguments: argparse.Namespace, record: Path, lives: Sequence[Life]) -> int:
    """Print where what an endpoint samples now parts from the record; return 1 if it does."""
    from inflight.http.kinds import connect_endpoint
    from inflight.model.checkpoints import load_tokenizer
    from inflight.replay.report import described_sampling
    from inflight.replay.sampling import replay_sampling

    config = next(it.config for it in lives if it.until is None or arguments.version < it.until)
    endpoint = connect_endpoint(arguments.engine, token=os.environ.get(TOKEN_VARIABLE))
    found = replay_sampling(
        record, config, endpoint, version=arguments.version, num_groups=arguments.groups, tolerance=arguments.tolerance
    )
    tokenizer = load_tokenizer(config.model.path) if config.model.path.is_dir() else None
    decode = (lambda token_ids: "") if tokenizer is None else tokenizer.decode
    print(described_sampling(found, arguments.tolerance, decode))
    if arguments.json is not None:
        _write_json(arguments.json, [asdict(it) for it in found])
    return int(any(it.parts_at is not None or it.parts_by_logprob_at is not None for it in found))


def _write_json(path: Path, values: Any) -> None:
    try:
        path.write_text(json.dumps(values, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"the report {str(path)!r} cannot be written: {error.strerror}") from error


def _say(line: str) -> None:
    print(f"inflight: {line}", file=sys.stderr, flush=True)
