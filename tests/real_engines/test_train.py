"""`inflight train` on a fleet of every kind at once: each member is started, samples, and gets every version."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.real_engines.servers import ENGINES, ROOT, python_of
from tests.run.runs import CONFIG

NUM_STEPS = 8


def test_a_run_starts_a_mixed_fleet_and_publishes_to_all_of_it(tmp_path: Path, tiny_model: Path) -> None:
    members = ['{ engine = "local" }', *(f'{{ engine = "{name}", python = "{python_of(name)}" }}' for name in ENGINES)]
    config, directory = tmp_path / "run.toml", tmp_path / "run"
    config.write_text(CONFIG.format(directory=directory, model=tiny_model))
    command = [sys.executable, "-m", "inflight", "train", str(config), "--servers.fleet", f"[{', '.join(members)}]"]
    command += ["--run.num_steps", str(NUM_STEPS), "--servers.max_concurrent", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    assert len(rows) == NUM_STEPS
    assert all(len(row["publish"]["paused_s"]) == len(members) for row in rows if row["publish"])
    assert len({event["endpoint"] for event in events if event["kind"] == "group"}) == len(members)
