"""The allocator's settings of trainer processes."""

from __future__ import annotations

import pytest

from inflight.run.machines.processes import _keeping_memory


def test_freed_memory_is_kept_unless_the_user_has_set_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _keeping_memory():
        monkeypatch.delenv(name, raising=False)
    assert set(_keeping_memory()) == {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"}
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "65536")
    assert set(_keeping_memory()) == {"MALLOC_MMAP_THRESHOLD_"}
