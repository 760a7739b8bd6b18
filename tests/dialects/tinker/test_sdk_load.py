"""Many futures at a time."""

from __future__ import annotations

import os

import pytest

from tests.dialects.tinker.server import TinkerServer
from tests.environments.apart import need

need("tinker")

import tinker  # noqa: E402
from tinker.types import SamplingParams  # noqa: E402

from tests.dialects.tinker.sdk import PROMPT, prompt_of  # noqa: E402

NUM_FUTURES = 512
NUM_ROUNDS = 5


def resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(300)
def test_512_futures_at_a_time_are_all_answered_without_growth_of_memory(
    service: tinker.ServiceClient, sdk_server: TinkerServer
) -> None:
    sampler = service.create_sampling_client(base_model=str(sdk_server.model)).result(60)
    sizes = []
    for _ in range(NUM_ROUNDS):
        asked = SamplingParams(max_tokens=3, stop=[])
        futures = [sampler.sample(prompt_of(PROMPT), 1, asked) for _ in range(NUM_FUTURES)]
        answers = [future.result(120).sequences for future in futures]
        assert [len(sequence.tokens) for (sequence,) in answers] == [3] * NUM_FUTURES
        assert len({sequence.sequence_id for (sequence,) in answers}) == NUM_FUTURES
        sizes.append(resident_bytes(sdk_server.pid))
    # What is kept of a future: its answer for two minutes, the spans of its sequence. A future that leaked with its
    # request and its task would be tens of kilobytes.
    assert (sizes[-1] - sizes[1]) / (NUM_FUTURES * (NUM_ROUNDS - 2)) < 8192, sizes
