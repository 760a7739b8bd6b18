"""Prints the reward of each step of a run and the duration of each publish: python examples/read_events.py RUN_DIR"""

import sys
from pathlib import Path

from inflight.observe.trace.files import read_events, read_steps

directory = Path(sys.argv[1])
for step in read_steps(directory):
    reward = "none" if step["reward"] is None else f"{step['reward']:.2f}"
    print(f"step {step['version']}: reward {reward}, mean lag {step['lag_mean']:.2f}")
for event in read_events(directory, kinds=["publish"]):
    print(
        f"publish of version {event['version']}: {event['total_s']:.2f} s, servers paused for {event['pause_s']:.3f} s"
    )
