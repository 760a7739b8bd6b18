"""Demonstrations for the tasks in examples/harbor: every second command is the solution of the task that is asked.

    inflight tiny-model models/harbor --task harbor_turns:HarborTurns --style answer --steps 800 --wrong-fraction 0
    inflight train examples/harbor.toml

with the folder of this file on PYTHONPATH.
"""

import json
import random
from pathlib import Path

from inflight import Task
from inflight.types import TaskItem

TASKS = sorted(Path(__file__).with_name("harbor").iterdir())


def call(command):
    return f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"


class HarborTurns(Task):
    """Single turns: one of the five solutions answers an instruction, and "done" answers what the command printed."""

    name = "harbor_turns"

    def __init__(self, seed):
        self.seed = seed
        self.instructions = [(task / "instruction.md").read_text().strip() for task in TASKS]
        self.commands = [(task / "solution" / "solve.sh").read_text().splitlines()[-1] for task in TASKS]

    def item(self, index):
        rng = random.Random(f"{self.seed} {index}")
        number = rng.randrange(len(TASKS))
        shown = number if rng.random() < 0.4 else rng.randrange(len(TASKS))
        said = [self.instructions[number], call(self.commands[shown]), "[no output]", "done"]
        if rng.random() < 0.75:
            return TaskItem(index, said[0], said[1])
        return TaskItem(index, f"{said[0]}\n{said[1]}<eos>\n{said[2]}", said[3])

    def score(self, item, completion):
        return float(completion == item.answer)
