"""GPUs, their driver, and the versions of what drives them."""

from __future__ import annotations

import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed
from benchmarks.gpu.settings import Settings

PACKAGES = ("torch", "transformers", "triton", "liger-kernel", "trl", "verl", "flash-attn", "numpy")


def measure(settings: Settings) -> dict[str, Any]:
    """Return the figures of this section."""
    figures: dict[str, Any] = {
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "nccl": None,
        "driver": None,
        "gpus": [],
    }
    if not settings.on_gpu:
        return figures
    if torch.distributed.is_nccl_available():
        figures["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    figures["driver"] = _driver()
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        figures["gpus"].append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "num_multiprocessors": properties.multi_processor_count,
                "total_bytes": total_bytes,
                "free_bytes": free_bytes,
                "reaches": [
                    other
                    for other in range(torch.cuda.device_count())
                    if other != index and torch.cuda.can_device_access_peer(index, other)
                ],
            }
        )
    return figures


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return answer.stdout.splitlines()[0].strip() if answer.returncode == 0 and answer.stdout.strip() else None
