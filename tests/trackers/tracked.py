"""A run as a tracker sees it, in a process of its own: ``python -m tests.trackers.tracked NAME OPTIONS DIRECTORY``.

It makes three steps, loses the third one, is resumed, and fails after the fifth. What the tracker has stored of it is
printed as JSON, with its values by version and name.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from inflight.observe.trackers import Reporting, TrackedRun, load_trackers
from inflight.rollouts.slots import SlotSeconds
from inflight.run.record.journal import Journal
from inflight.wire import DraftCounts
from tests.gates import NEVER_S

CONFIG = {"run": {"num_steps": 5, "stop_at_reward": None}, "train": {"learning_rate": 0.25}}
RUN_ID = "letters-1a2b3c4d"
FAILURE = "rank 0 was lost"

Stored = dict[str, Any]


def loss_of(version: int, incarnation: int) -> float:
    return version + incarnation / 8


def live(name: str, options: dict[str, Any], directory: Path) -> list[str]:
    """Live twice; return what the user is told."""
    told: list[str] = []
    first = _incarnation(name, options, directory, None, 0, told)
    state: dict[str, Any] = {}
    for version in (1, 2, 3):
        _step(first[0], version, 0)
        state = first[0].state() if version == 2 else state
    first[0].close()
    first[1].end(None, within_s=NEVER_S)  # else a library in the same process would not begin again
    second = _incarnation(name, options, directory, state, 2, told)
    for version in (3, 4, 5):
        _step(second[0], version, 1)
    second[0].close()
    second[1].end(FAILURE, within_s=NEVER_S)
    return told


def _incarnation(
    name: str, options: dict[str, Any], directory: Path, state: dict[str, Any] | None, version: int, told: list[str]
) -> tuple[Journal, Reporting]:
    if name == "wandb":  # offline, its folders are named by the second in which a run begins
        place = directory / f"from-version-{version}"
        place.mkdir()
        options = {**options, "dir": str(place)}
    trackers = load_trackers([name], {name: options} if options else {})
    reporting = Reporting(trackers, TrackedRun(RUN_ID, directory, CONFIG, version), told.append)
    return Journal(directory, state, version, listeners=[reporting.report]), reporting


def _step(journal: Journal, version: int, incarnation: int) -> None:
    journal.trained(version, [(0.0, 1.0)])
    facts = {
        "loss": loss_of(version, incarnation),
        "unknown": float("nan"),
        "publish": {"version": version, "paused_s": {"http://127.0.0.1:8000": 0.5}},
    }
    journal.step(Counter([0]), 3, facts, [0], SlotSeconds(), DraftCounts())


# ---------------------------------------------------------------------------------------------------------------
# What they stored


def tensorboard(directory: Path) -> Stored:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory / "tensorboard"))
    found.Reload()
    steps: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for tag in found.Tags()["scalars"]:
        for scalar in found.Scalars(tag):
            steps[scalar.step][tag].append(scalar.value)
    (text,) = found.Tensors("config/text_summary")
    config = json.loads(text.tensor_proto.string_val[0].decode().removeprefix("```json\n").removesuffix("\n```"))
    return {"config": config, "steps": steps}


def wandb(directory: Path) -> Stored:
    from wandb.proto.wandb_internal_pb2 import Record

    steps: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    runs, config, summary = set(), {}, {}
    exit_codes = []
    for path in sorted(directory.glob("from-version-*/wandb/offline-run-*/run-*.wandb")):
        for data in _leveldb_records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                runs.add(record.run.run_id)
                config |= {it.key: json.loads(it.value_json) for it in record.run.config.update}
            elif kind == "history":
                values = {(it.key or "/".join(it.nested_key)): json.loads(it.value_json) for it in record.history.item}
                for name, value in values.items():
                    steps[record.history.step.num][name].append(float(value))
            elif kind == "summary":
                updates = record.summary.update
                summary |= {(it.key or it.nested_key[0]): json.loads(it.value_json) for it in updates}
            elif kind == "exit":
                exit_codes.append(record.exit.exit_code)
    config = {key: value for key, value in config.items() if not key.startswith("_")}
    return {
        "config": config,
        "steps": steps,
        "runs": sorted(runs),
        "failure": summary.get("failure"),
        "ends": exit_codes,
    }


def _leveldb_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, which begins with seven bytes of W&B's.

    Records lie in blocks of 32 KiB, each part behind a checksum, its length and whether it is a first or last one.
    """
    at, parts, first_or_whole, last_or_whole = 7, b"", (1, 2), (1, 4)
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        part = data[at + 7 : at + 7 + length]
        parts = part if kind in first_or_whole else parts + part
        if kind in last_or_whole:
            yield parts
        at += 7 + length


def trackio(directory: Path) -> Stored:
    from trackio.sqlite_storage import SQLiteStorage

    steps: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    runs = SQLiteStorage.get_runs("letters")
    for row in SQLiteStorage.get_logs("letters", RUN_ID):
        for name, value in row.items():
            if isinstance(value, int | float) and name != "step":
                steps[row["step"]][name].append(value)
    config = SQLiteStorage.get_run_config("letters", RUN_ID)
    config = {key: value for key, value in (config or {}).items() if not key.startswith("_")}
    return {"config": config, "steps": steps, "runs": runs}


def mlflow(directory: Path) -> Stored:
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("letters")
    runs = client.search_runs([experiment.experiment_id])
    (run,) = runs
    steps: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            steps[metric.step][name].append(metric.value)
    return {
        "config": run.data.params,
        "steps": steps,
        "runs": [run.info.run_name for run in runs],
        "failure": run.data.tags["inflight.failure"],
        "ends": [run.info.status],
    }


def main() -> None:
    name, options, directory = sys.argv[1:]
    os.chdir(directory)
    told = live(name, json.loads(options), Path(directory))
    if name == "wandb":  # its process of its own answers that a run has ended, and then writes the rest of its file
        import wandb

        wandb.teardown()
    stored = globals()[name](Path(directory))
    print(json.dumps({"told": told, **stored}))


if __name__ == "__main__":
    main()
