"""The planner: a run in simulated time with the live policies, its calibration from a run's events, and the search.

Nothing here loads torch or starts a process.
"""

from inflight.planning.costs import Endpoint, PublishCost, TokenTime, TrainerCost
from inflight.planning.simulation import Outcome, Prompted, Setup, simulate

__all__ = ["Endpoint", "Outcome", "Prompted", "PublishCost", "Setup", "TokenTime", "TrainerCost", "simulate"]
