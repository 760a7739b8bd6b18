"""A run on a machine that says it has two GPUs: every process is started with its own. Torch uses none of them here."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tests.run.runs import ROOT, RunProcess

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """Environment of a run that finds a management tool which lists three GPUs, and may use two of them."""
    if torch.cuda.is_available():
        pytest.skip("the run would use the GPUs of this machine")
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\nfor i in 0 1 2; do echo "$i, GPU-$i, 81559"; done\n')
    tool.chmod(0o755)
    return {"PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "2,0"}


def test_each_process_is_started_with_its_own_gpus(tmp_path: Path, model_dir: Path, machine: dict[str, str]) -> None:
    # Forked processes do not show their environment in /proc: each writes it down when it starts.
    (seen_by := tmp_path / "environments").mkdir()
    (seen_by / "sitecustomize.py").write_text(
        "import json, os, pathlib\n"
        f"(pathlib.Path({str(seen_by)!r}) / str(os.getpid())).write_text(json.dumps(dict(os.environ)))\n"
    )
    machine = machine | {"PYTHONPATH": os.pathsep.join(map(str, (seen_by, ROOT / "src", ROOT)))}
    run = RunProcess(tmp_path, model_dir, "--run.num_steps", "100000", environment=machine)
    try:
        run.wait_for_steps(1)
        assert "trainer-0 on GPU 0; server-0 on GPU 1" in run.output()
        environments = {name: json.loads((seen_by / str(pid)).read_text()) for name, pid in run.processes().items()}
        seen = {name: found["CUDA_VISIBLE_DEVICES"] for name, found in environments.items()}
        assert seen == {"controller": "2,0", "trainer-0": "2", "server-0": "0"}
        assert environments["trainer-0"]["LOCAL_RANK"] == "0"
    finally:
        run.kill()


def test_a_colocated_run_that_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, model_dir: Path, machine: dict[str, str]
) -> None:
    """vLLM fills 0.92 of the GPU by itself, which leaves the trainer less than the GiB that its context takes."""
    tool = Path(machine["PATH"].split(os.pathsep)[0]) / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-0, 8192'\n")
    shared = ("--servers.colocated", "true", "--servers.engine", "vllm")
    run = RunProcess(tmp_path, model_dir, *shared, environment=machine | {"CUDA_VISIBLE_DEVICES": "0"})
    assert run.wait() == 1
    assert "GPU 0 is estimated to need" in run.output()
    assert "set run.mode = 'conventional' and servers.release_memory" in run.output()
    assert not run.directory.exists()


def test_a_run_that_needs_more_gpus_is_refused_before_anything_is_written(
    tmp_path: Path, model_dir: Path, machine: dict[str, str]
) -> None:
    run = RunProcess(tmp_path, model_dir, "--train.num_ranks", "2", environment=machine)
    assert run.wait() == 1
    assert (
        "the run needs 3 GPUs (2 for trainer ranks, 1 for server-0) but sees 2: lower train.num_ranks" in run.output()
    )
    assert not run.directory.exists()
