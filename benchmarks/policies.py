"""The quickstart under every policy, each by one setting, on the same seed: reward over samples, with the default's.

Run: ``python benchmarks/policies.py``, half an hour on two idle cores; ``--only NAME`` runs one and keeps the others.
Rewards are over samples, since other work on the machine changes times and not rewards.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.quickstart import run_quickstart
from benchmarks.results import DIRECTORY, read_results, write_results

from inflight.rollouts.composers import COMPOSERS
from inflight.rollouts.schedulers import SCHEDULERS
from inflight.rollouts.staleness import STALENESS

NUM_STEPS = 100
DEFAULTS = {"scheduler": "least_loaded", "staleness": "max_lag", "composer": "token_budget"}


def settings() -> dict[str, list[str]]:
    """Return the overrides of each run; the first has none."""
    found: dict[str, list[str]] = {"default": []}
    for key, names in (("scheduler", SCHEDULERS), ("staleness", STALENESS), ("composer", COMPOSERS)):
        found |= {f"{key} {name}": [f"--rollouts.{key}", name] for name in names if name != DEFAULTS[key]}
    found["min_ess 0.9"] = ["--rollouts.min_ess", "0.9"]
    found["drafts siblings"] = ["--servers.drafts", "siblings"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*")
    arguments = parser.parse_args()
    rows = read_results("policies")["rows"] if (DIRECTORY / "policies.json").exists() else {}
    for name, overrides in settings().items():
        if name in (arguments.only or settings()):
            result = run_quickstart(*overrides, num_steps=NUM_STEPS)
            rows[name] = {"overrides": overrides, **result}
            print(f"{name:28} {result['reward_first']:.3f} -> {result['reward_last']:.3f}, {result['seconds']:.0f} s")
            write_results("policies", rows)


if __name__ == "__main__":
    main()
