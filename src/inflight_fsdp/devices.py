"""The device on which a rank computes."""

from __future__ import annotations

import os

import torch

from inflight.errors import ConfigError


def device_of(kind: str | None) -> torch.device:
    """Return this rank's device of the given kind; the default is a GPU if there is one, and otherwise the CPU.

    Raises `ConfigError` if there is no such device.
    """
    kind = kind or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device is 'cuda' but torch sees no GPU; set device = 'cpu' or install torch with CUDA")
    index = device_index(int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count())
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def device_index(local_rank: int, num_devices: int) -> int:
    """Return the index of the GPU that a rank uses, among those that its process sees.

    Raises `ConfigError` if ranks would share a GPU.
    """
    if local_rank >= num_devices:
        raise ConfigError(
            f"LOCAL_RANK is {local_rank}, but torch sees {num_devices} GPUs, so two ranks would share one, which "
            "NCCL refuses: start one rank per GPU, or set LOCAL_RANK=0 where each rank sees only its own"
        )
    return local_rank
