"""`inflight train` on a fleet of every kind at once: each member is started, samples, and gets every version.

What was recorded of it is trained on again without engines.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.real_engines.servers import ENGINES, ROOT, python_of
from tests.run.runs import CONFIG

NUM_STEPS = 8


def test_a_run_on_a_mixed_fleet_publishes_to_all_of_it_and_is_replayed_on_both_trainers(
    tmp_path: Path, tiny_model: Path
) -> None:
    members = [
        '{ engine = "embedded" }',
        *(f'{{ engine = "{name}", python = "{python_of(name)}" }}' for name in ENGINES),
    ]
    config, directory = tmp_path / "run.toml", tmp_path / "run"
    config.write_text(CONFIG.format(directory=directory, model=tiny_model))
    command = [sys.executable, "-m", "inflight", "train", str(config), "--servers.fleet", f"[{', '.join(members)}]"]
    command += ["--run.num_steps", str(NUM_STEPS), "--servers.max_concurrent", "8", "--run.record", "true"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    assert len(rows) == NUM_STEPS
    assert all(len(row["publish"]["paused_s"]) == len(members) for row in rows if row["publish"])
    assert len({event["endpoint"] for event in events if event["kind"] == "group"}) == len(members)
    assert replay(directory, "fsdp")["is_bit_equal"]
    report = replay(directory, "torchtitan")
    assert not report["is_bit_equal"]
    assert report["first_beyond_rounding"] is None


def replay(directory: Path, trainer: str) -> dict[str, Any]:
    """Train on a record again; return the report, which must say that nothing differs by more than rounding."""
    report = directory.with_name(f"{trainer}.json")
    command = [sys.executable, "-m", "inflight", "replay", str(directory), "--trainer", trainer, "--json", str(report)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return dict(json.loads(report.read_text()))
