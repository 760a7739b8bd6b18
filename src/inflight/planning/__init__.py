"""The planner: it calibrates costs from recorded runs, simulates runs with the policies of live runs, and searches for
the best configurations.

This package does not import torch, and only `inflight.planning.measuring` starts processes.
"""

from inflight.planning.costs import Endpoint, PublishCost, TokenTime, TrainerCost
from inflight.planning.groups import Prompted
from inflight.planning.outcome import SimulationResult
from inflight.planning.setup import Setup
from inflight.planning.simulation import simulate

__all__ = ["Endpoint", "Prompted", "PublishCost", "Setup", "SimulationResult", "TokenTime", "TrainerCost", "simulate"]
