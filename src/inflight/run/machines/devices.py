"""The GPUs of this machine that a run may use, as ``nvidia-smi`` reports them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace

from inflight.errors import ConfigError

_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
_ANSWER_S = 20.0
_UNITS = {"GiB": 1 << 30, "GB": 10**9}


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU.

    ``index`` is its number among the GPUs that the run may use, as torch would count in the run's process.
    """

    index: int
    uuid: str
    memory_bytes: int
    """0 if unknown."""
    word: str = ""
    """The GPU's name in CUDA_VISIBLE_DEVICES; if empty, the index is used."""

    @property
    def cuda_name(self) -> str:
        """The name of the device in a child's CUDA_VISIBLE_DEVICES."""
        return self.word or str(self.index)


def devices_here() -> tuple[Device, ...]:
    """Return the GPUs that this process may use. Raises `ConfigError` if they cannot be determined."""
    return visible_devices(installed_devices(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def num_cores_here() -> int:
    """Return the number of cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def installed_devices(query: Sequence[str] = _QUERY) -> tuple[Device, ...]:
    """Return every GPU of this machine, in PCI bus order; empty if there is no NVIDIA driver.

    Raises `ConfigError` if the driver does not answer.
    """
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_ANSWER_S, check=True)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{query[0]} did not answer within {_ANSWER_S:g} s, so the GPUs of this machine are unknown: repair the "
            "driver, or set train.device and servers.device to 'cpu'"
        ) from error
    except (OSError, subprocess.CalledProcessError):  # there is no driver
        return ()
    return tuple(_device(line) for line in answer.stdout.splitlines() if line.strip())


def _device(line: str) -> Device:
    try:
        index, uuid, mebibytes = (word.strip() for word in line.split(","))
        return Device(int(index), uuid, (int(mebibytes) << 20) if mebibytes.isdecimal() else 0)
    except ValueError as error:
        raise ConfigError(
            f"nvidia-smi describes a GPU as {line!r}, which cannot be parsed; expected index, uuid and memory"
        ) from error


def visible_devices(devices: Sequence[Device], visible: str | None) -> tuple[Device, ...]:
    """Return the devices that CUDA_VISIBLE_DEVICES (None if not set) leaves visible, renumbered from 0.

    As in CUDA, an invalid index hides the devices after it. Raises `ConfigError` for a name that does not match
    exactly one device.
    """
    if visible is None:
        return tuple(devices)
    found: list[Device] = []
    for word in (word.strip() for word in visible.split(",")):
        if re.fullmatch(r"-?\d*", word):
            match = [device for device in devices if str(device.index) == word]
        else:
            match = [device for device in devices if device.uuid.startswith(word)]
            if devices and len(match) != 1:
                raise ConfigError(
                    f"CUDA_VISIBLE_DEVICES names {word!r}, but the GPUs of this machine are "
                    f"{', '.join(device.uuid for device in devices)}: a run places processes on whole GPUs only"
                )
        if not match:
            break
        found.append(replace(match[0], index=len(found), word=word))
    return tuple(found)


def described_devices(text: str) -> tuple[Device, ...]:
    """Return hypothetical devices from a description such as ``8x80GiB``. Raises `ConfigError` for any other text."""
    match = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)(GiB|GB)", text)
    if match is None:
        raise ConfigError(f"{text!r} does not describe GPUs; write their number and memory, such as 8x80GiB")
    memory_bytes = int(float(match[2]) * _UNITS[match[3]])
    return tuple(Device(i, f"GPU-{i}", memory_bytes) for i in range(int(match[1])))
