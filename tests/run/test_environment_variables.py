"""What a run sets in the environment of the processes that compute on a CPU."""

from __future__ import annotations

import pytest

from inflight.run.machines.processes import CPU_RANK_VARIABLES, unless_set


def test_variables_that_the_user_has_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "OMP_WAIT_POLICY"}
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert unless_set(CPU_RANK_VARIABLES).keys() == names
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert unless_set(CPU_RANK_VARIABLES).keys() == names - {"OMP_WAIT_POLICY"}
