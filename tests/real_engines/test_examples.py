"""The plain PyTorch loop of examples/, as a user runs it against a real engine."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.real_engines.servers import ROOT, RealEngine, publish


def test_the_plain_loop_trains_against_the_engine_itself(engine: RealEngine) -> None:
    done = subprocess.run(
        [sys.executable, "examples/plain_grpo.py", str(engine.model), engine.url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = re.findall(r"^version (\d+): reward \d\.\d+, paused [\d.]+ ms", done.stdout, re.MULTILINE)
    assert lines == ["1", "2", "3", "4", "5"], done.stdout
    with engine.publisher() as publisher:
        publish(publisher, engine.tensors, 1)
