"""``inflight dialect vllm`` with a fault, for the kit to find: python -m tests.dialects.four_phase_server FAULT ..."""

from __future__ import annotations

import sys
from typing import Any

from inflight import cli
from inflight.dialects import directory_updates
from inflight.dialects.directory_updates import DirectoryUpdates
from inflight.dialects.vllm import messages
from inflight.errors import ConfigError
from inflight.weights.send.stored import AdapterWeights, _StoredWeights

real_load, real_spans = DirectoryUpdates.load, messages.weight_versions_of


async def load_nothing(self: DirectoryUpdates, path: str, **more: Any) -> int:
    """Report success, under a new label, without a change of the weights."""
    version = max(self._publisher.run(endpoint.weight_version).version for endpoint in self._publisher.endpoints)
    self.relabel(version, more["label"])
    return version


async def pause_nothing(*_: Any) -> None:
    """Report a pause that does not happen."""


def one_span(spans: Any, label_of: Any) -> Any:
    """Name the last version for all tokens."""
    found = real_spans(spans, label_of)
    return [found[-1] | {"start": 0}] if found else found


def lose_files() -> None:
    """Make reading fail after the checks for each directory named ``lost``, and for each LoRA."""
    real = _StoredWeights.gather_weights

    def gather(self: Any, buckets: Any) -> Any:
        for number, bucket in enumerate(real(self, buckets)):
            yield bucket
            if isinstance(self, AdapterWeights) or "lost" in str(next(iter(self._stored.values())).file):
                raise ConfigError(f"the file after bucket {number} is gone")

    _StoredWeights.gather_weights = gather  # type: ignore[method-assign]


FAULTS = {
    "lost-file": lose_files,
    "no-slack": lambda: setattr(directory_updates, "_LEASE_SLACK_S", 0.0),  # a pause ends when the servers' lease ends
    "lost-update": lambda: setattr(DirectoryUpdates, "load", load_nothing),
    "no-pause": lambda: setattr(DirectoryUpdates, "pause", pause_nothing),
    "scalar-version": lambda: setattr(messages, "weight_versions_of", one_span),
}

if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
    sys.exit(cli.main(["dialect", "vllm", *sys.argv[2:]]))
