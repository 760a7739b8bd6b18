"""A process of a campaign that dies in its second schedule. It imports nothing that takes long."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from inflight.conformance.fleet.campaign import ScheduleResult
from tests.chaos.campaign import Campaign


def work(campaign: Campaign, number: int, results: Connection) -> None:
    """Send one result, and die."""
    results.send(ScheduleResult(campaign.seed, "gloo", "a plan"))
    sys.exit(3)
