"""The planner: simulates runs with the live policies, calibrates costs from recorded runs, and searches configurations.

This package does not load torch, and only `inflight.planning.measuring` starts processes.
"""

from inflight.planning.costs import Endpoint, PublishCost, TokenTime, TrainerCost
from inflight.planning.groups import Prompted
from inflight.planning.outcome import SimulationResult
from inflight.planning.setup import Setup
from inflight.planning.simulation import simulate

__all__ = ["Endpoint", "Prompted", "PublishCost", "Setup", "SimulationResult", "TokenTime", "TrainerCost", "simulate"]
