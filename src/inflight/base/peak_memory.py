"""The peak of the resident memory of this process, as the Linux kernel counts it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from pathlib import Path

_CLEAR_REFS, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class PeakMemory:
    """Measures how much this process's resident memory grows, including memory shared with other processes.

    Measuring starts with the constructor, which first returns freed memory to the system. Raises ``OSError`` if the
    kernel does not count or reset the peak.
    """

    def __init__(self) -> None:
        gc.collect()
        with contextlib.suppress(AttributeError):  # only glibc has it
            ctypes.CDLL(None).malloc_trim(0)
        _CLEAR_REFS.write_text("5")
        self._before = _bytes_of("VmRSS")

    def grown_bytes(self) -> int:
        """Return by how many bytes the peak since the start exceeds the memory at the start."""
        return _bytes_of("VmHWM") - self._before

    def kept_bytes(self) -> int:
        """Return by how many bytes the memory now exceeds the memory at the start."""
        return _bytes_of("VmRSS") - self._before


def _bytes_of(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"{_STATUS} does not contain {field}")
    return int(found[1]) * 1024
