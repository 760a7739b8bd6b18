"""Messages from transports to their receivers: where a weight group is formed, or where weights are stored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from inflight.wire.fields import usable_host, usable_url
from inflight.wire.weights import TransportSpec


def _usable_path(path: str) -> str:
    if "\0" in path:
        raise ValueError("a path cannot contain a NUL character")
    return path


class ProcessGroupSpec(TransportSpec):
    """How one endpoint joins the group over which weights are sent.

    The trainer is rank 0 and hosts the group's store, which only members that know ``secret`` can use. The endpoint's
    ranks are ``rank`` to ``rank + num_ranks - 1`` of ``world_size``. ``/init_process_group`` returns once the group is
    formed, or fails after ``timeout_s`` seconds.
    """

    transport: Literal["gloo", "nccl"]
    group_name: str = Field(min_length=1, max_length=1024)
    master_address: Annotated[str, AfterValidator(usable_host)]
    master_port: int = Field(ge=1, le=65535)
    secret: str = Field(pattern=r"^[0-9a-f]{64}$", repr=False)
    rank: int = Field(ge=1, le=65535)
    world_size: int = Field(ge=2, le=65536)

    @property
    def group(self) -> str:
        return self.group_name

    @model_validator(mode="after")
    def _rank_is_of_the_group(self) -> ProcessGroupSpec:
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} is outside a group of {self.world_size} ranks")
        return self


class DirectorySpec(TransportSpec):
    """Where one endpoint reads the buckets that the publisher stores, on a file system that both can access.

    For ``shm``, the directory is in this host's memory, and endpoints map the files that contain buckets. For ``file``,
    the directory is on any file system, and each update is a subdirectory of safetensors files.
    """

    transport: Literal["shm", "file"]
    directory: Annotated[str, AfterValidator(_usable_path)] = Field(min_length=1, max_length=4096)


class IpcSpec(TransportSpec):
    """Where one endpoint finds the memory that the publisher shares: ``place`` is the UUID of the publisher's GPU.

    ``directory`` is on the host of both processes. It contains the handle of the memory and the position of each bucket
    in it.
    """

    transport: Literal["ipc"]
    directory: Annotated[str, AfterValidator(_usable_path)] = Field(min_length=1, max_length=4096)
    place: str = Field(pattern=r"^[A-Za-z0-9-]{1,64}$")


class HttpFileSpec(TransportSpec):
    """Where one endpoint fetches the files of `DirectorySpec` over HTTP, in byte ranges, with a bearer token."""

    transport: Literal["http"]
    url: Annotated[str, AfterValidator(usable_url)] = Field(pattern=r"^https?://", max_length=2048)
    token: str = Field(pattern=r"^[!-~]+$", max_length=1024, repr=False)
