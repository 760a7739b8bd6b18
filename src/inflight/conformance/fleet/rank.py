"""The process of a trainer's rank 1, which sends its parts of the weights until the campaign ends it.

At every step, rank 1 asks the campaign whether a fault is due, and waits for the answer, so that the campaign can kill
or stop it at exactly that point.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from safetensors.torch import load_file

from inflight.conformance.fleet.plan import RANK, Fault, Kind, Transport, UpdateStep
from inflight.conformance.fleet.sender import FaultySender
from inflight.conformance.fleet.sources import RankLink, ShardedShadeSource
from inflight.errors import TransferError
from inflight.weights.send.ranks import PartSender
from inflight.weights.transports import make_sender


@dataclass(frozen=True, slots=True)
class RankSettings:
    """The information that rank 1 needs when it starts. Rank 1 stores its parts in ``directory``."""

    transport: Transport
    frozen: tuple[str, ...]
    directory: Path


def run_rank(connection: Connection, control: Connection, settings: RankSettings) -> None:
    """Act as rank 1: take part in one publish per message from ``control``, until ``control`` is closed or rank 0 is
    lost.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    campaign = _Campaign(control)
    link = RankLink(connection, other=0)
    source = ShardedShadeSource(1, settings.frozen, link, lambda step, bucket: campaign.pass_step(link, step, bucket))
    where = None if settings.transport == "gloo" else settings.directory
    sender = FaultySender(
        make_sender(settings.transport, directory=where),
        settings.directory,
        lambda step, bucket: campaign.due(link, step, bucket),
        threading.Event(),
    )
    try:
        campaign.tell({"ended": None})
        with PartSender(source, sender) as parts:
            while link.lost is None:
                order = json.loads(control.recv_bytes())
                if order is None:
                    return
                tensors = load_file(order["file"])
                source.hold(order["version"], {name: tensors[name] for name in order["names"]})
                source.is_sharded = order["is_sharded"]
                try:
                    parts.send(order["deadline_s"])
                except TransferError as error:
                    link.lose(str(error))
                campaign.tell({"ended": link.lost})
    except (EOFError, OSError):
        return  # the campaign no longer needs it
    except BaseException:
        campaign.tell({"problem": traceback.format_exc()[-900:]})
        os._exit(1)


class _Campaign:
    """The campaign as rank 1 sees it. Any thread may query it."""

    def __init__(self, control: Connection) -> None:
        self._control = control
        self._lock = threading.Lock()

    def tell(self, message: object) -> None:
        with self._lock:
            self._control.send_bytes(json.dumps(message).encode())

    def due(self, link: RankLink, step: str, bucket: int) -> Fault | None:
        """Return the fault to inject here, if any. If the fault is a cut link, cut the link."""
        with self._lock:
            self._control.send_bytes(json.dumps({"step": step, "bucket": bucket}).encode())
            said = json.loads(self._control.recv_bytes())
        if said is None:
            return None
        fault = Fault(RANK, UpdateStep(f"rank_{step}"), Kind(said["kind"]), 0, bucket, said["seconds"], said["num"])
        if fault.kind is Kind.UNLINK:
            link.lose("the connection was cut")
        return fault

    def pass_step(self, link: RankLink, step: str, bucket: int) -> None:
        fault = self.due(link, step, bucket)
        if fault is not None and fault.kind in (Kind.DELAY, Kind.TAKE_OVER):
            time.sleep(fault.seconds)
