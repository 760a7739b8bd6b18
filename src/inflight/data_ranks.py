"""Which share of the data a trainer rank gets."""

from __future__ import annotations

from typing import NamedTuple

from inflight.contracts import ModelParallelWorker, TrainerWorker


class DataRanks(NamedTuple):
    """A rank's share of the data, counted from 0, and the number of shares."""

    rank: int
    size: int


def data_ranks_of(worker: TrainerWorker) -> DataRanks:
    """Return the share of a worker: that of its rank, unless several ranks compute a share together."""
    if isinstance(worker, ModelParallelWorker):
        return DataRanks(worker.data_parallel_rank, worker.data_parallel_size)
    return DataRanks(worker.rank, worker.world_size)
