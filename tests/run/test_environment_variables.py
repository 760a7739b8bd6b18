"""What commands and runs set in the environment of the processes that compute on a CPU."""

from __future__ import annotations

import os

import pytest

from inflight.cli import main
from inflight.run.machines.processes import CPU_RANK_VARIABLES, unless_set


def test_variables_that_the_user_has_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "OMP_WAIT_POLICY"}
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert unless_set(CPU_RANK_VARIABLES).keys() == names
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert unless_set(CPU_RANK_VARIABLES).keys() == names - {"OMP_WAIT_POLICY"}


def test_commands_have_threads_wait_asleep_unless_the_user_has_set_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_OFFLINE", "TQDM_DISABLE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
