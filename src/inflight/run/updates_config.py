"""The section ``updates`` of a run: how each new version of the weights reaches the servers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from inflight.base.toml import Section
from inflight.base.transport_registry import find_transport
from inflight.errors import ConfigError
from inflight.launchers.launcher import ADDRESS_VARIABLE
from inflight.weights.encode.bucket_bytes import Rounding
from inflight.wire import InFlightPolicy, TransportName


class UpdatesSection(Section):
    """How each new version of the weights reaches the servers, and what happens to running completions."""

    mode: Literal["push", "pull"] = "push"
    """``push`` sends each version to the servers and waits for them. ``pull`` stores each version as files, and every
    server loads the newest one when it can."""
    transport: TransportName = "gloo"
    """A broadcast transport (``gloo``, ``nccl``), a stored one (``shm``, ``ipc``, ``file``, ``http``), or one that an
    installed package provides."""
    in_flight: InFlightPolicy = InFlightPolicy.KEEP
    """What an update does to running completions: see `inflight.wire.InFlightPolicy`."""
    address: str = "127.0.0.1"
    """The address at which servers reach the host of trainer rank 0, where ``gloo``, ``nccl`` and ``http`` listen. If
    it is not set, the run uses the address that the launcher reports: 127.0.0.1 with launcher ``local``."""
    directory: Path | None = None
    """Where the transport ``file`` stores weights: a path that the trainer and every server can read."""
    deadline_s: float | None = Field(default=None, gt=0)
    """How long a publish may take. If not set, 60 s plus the time to move the weights at 0.5 GB/s."""
    quorum: int | None = Field(default=None, ge=1)
    """How many servers must hold each version; with fewer, the run waits. If not set, every server that can be
    reached must hold it, and at least one must be reached.
    """
    encoding: Rounding = "raw"
    """``bfloat16`` and ``float8`` round the weights in transit, so that fewer bytes are sent. ``raw`` sends them
    exactly."""
    delta: bool = False
    """Send only the elements that changed since the last publish. Trainer and servers each keep one more copy of the
    weights."""
    sharded: bool = False
    """Make every trainer rank send the weights that it holds, instead of gathering them on rank 0. This is faster if
    ranks are on several hosts and the hosts' links are the bottleneck."""
    overlap: bool = False
    """Run the forward and backward passes of the next step while a version is being published; the optimizer waits
    until the publish has ended. This is faster if publishes are slow. With several ranks, it needs ``sharded``."""
    staged: bool = True
    """Keep sampling while weights arrive, on servers that support it. Those servers temporarily hold a second copy of
    the weights."""

    @property
    def followed(self) -> Path | None:
        """The directory from which servers load the newest version; None if versions are pushed."""
        return self.directory if self.mode == "pull" else None

    @property
    def own_address(self) -> str:
        """The address at which servers reach the host of this rank: ``address`` if set, or else the launcher's."""
        if "address" in self.model_fields_set:
            return self.address
        return os.environ.get(ADDRESS_VARIABLE, self.address)

    @model_validator(mode="after")
    def _transport_is_installed(self) -> Self:
        try:
            find_transport(self.transport)
        except ConfigError as error:
            raise ValueError(f"updates.transport: {error}") from error
        return self

    @model_validator(mode="after")
    def _has_a_directory_where_it_stores_files(self) -> Self:
        if self.transport == "file" and self.directory is None:
            raise ValueError(
                "updates.transport 'file' needs updates.directory, which the trainer and every server can read"
            )
        if self.transport != "file" and self.directory is not None:
            raise ValueError(
                f"updates.directory applies only to updates.transport 'file', but the transport is "
                f"{self.transport!r}: leave out one of them"
            )
        return self

    @model_validator(mode="after")
    def _stored_versions_wait_for_nobody(self) -> Self:
        if self.mode == "pull":
            if self.transport != "file":
                raise ValueError(
                    f"updates.mode 'pull' stores versions in updates.directory, but updates.transport is "
                    f"{self.transport!r}: set it to 'file'"
                )
            if self.delta or self.quorum is not None:
                raise ValueError(
                    "updates.mode 'pull' does not wait for servers: leave out updates.delta and updates.quorum"
                )
            if self.sharded:
                raise ValueError("updates.mode 'pull' stores whole tensors: leave out updates.sharded")
            if self.overlap:
                raise ValueError("updates.mode 'pull' stores versions before the next step: leave out updates.overlap")
        return self

    @model_validator(mode="after")
    def _scales_are_of_whole_tensors(self) -> Self:
        if self.sharded and self.encoding == "float8":
            raise ValueError(
                "updates.encoding 'float8' needs whole tensors, for their scales: leave out updates.sharded, or use "
                "another encoding"
            )
        return self

    @model_validator(mode="after")
    def _deltas_are_exact(self) -> Self:
        if self.delta and self.encoding != "raw":
            raise ValueError(
                "updates.delta sends changed elements unrounded, but updates.encoding is "
                f"{self.encoding!r}: leave one of them out"
            )
        return self
