"""What `make dist` builds can be installed into a fresh environment, and brings the command and its files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_the_built_wheel_works_in_a_fresh_environment(tmp_path: Path) -> None:
    subprocess.run(["make", "--no-print-directory", "dist", f"PYTHON={sys.executable}"], cwd=ROOT, check=True)
    (wheel,) = (ROOT / "dist").glob("*.whl")
    assert len(list((ROOT / "dist").glob("*.tar.gz"))) == 1
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "fresh"], check=True)
    programs = tmp_path / "fresh" / "bin"
    pip = [programs / "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    subprocess.run([*pip, f"inflight[local,fsdp,conformance] @ file://{wheel}"], check=True)

    def said(*words: str) -> str:
        command = [programs / "inflight", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120).stdout

    assert "tiny-model" in said("--help")
    assert "GRPO" in said("losses", "grpo")
    assert "[rollouts]" in said("config")
    template = ROOT / "examples" / "backend_template"
    subprocess.run([*pip, "--no-deps", template], check=True)
    assert "1 of 1 checks hold" in said("check", "endpoint", "my_engine:MyEndpoint", "--check", "E-11")
