"""An environment of three turns, whose answer cannot be had without its tool, and what a model for it imitates first.

    inflight tiny-model models/vault --task tool_task:vault_turns --style answer
    inflight train examples/tool_task.toml
    inflight train examples/tool_agent.toml

with the folder of this file on PYTHONPATH.
"""

import random

from inflight import Environment, Task
from inflight.types import TaskItem

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Says what is at a place.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}


def places(seed, index):
    """Return where to look first, where that leads, and the code that is there."""
    rng = random.Random(f"{seed} {index}")
    words = ["".join(map(rng.choice, ("bdfgklmnprst", "aeiou", "bdfgklmnprst"))) for _ in range(2)]
    return *words, "".join(rng.sample("0123456789", 3))


def call(at):
    return f'<tool_call>{{"name": "look", "arguments": {{"at": "{at}"}}}}</tool_call>'


class Vault(Environment):
    """The prompt names a place, the tool reports there which other place has the code, and the code is the answer."""

    name = "vault"

    def __init__(self, seed):
        self.seed = seed

    def item(self, index):
        first, second, code = places(self.seed, index)
        return TaskItem(index, f"vault {first}", code, {first: f"see {second}", second: code})

    async def play(self, item, episode):
        conversation = episode.conversation(tools=[LOOK])
        reply = await conversation.say(item.prompt)
        num_found = 0
        for expected in item.metadata:
            found = None
            if len(reply.tool_calls) == 1:
                found = item.metadata.get(reply.tool_calls[0].arguments.get("at"))
            if found is None or found != item.metadata[expected]:
                return num_found / 4
            num_found += 1
            reply = await conversation.say({"role": "tool", "content": found})
        return num_found / 4 + (reply.text == item.answer) / 2


class VaultTurns(Task):
    """Single turns of `Vault` with what would be right to say: demonstrations for a warm start."""

    name = "vault_turns"

    def __init__(self, seed):
        self.seed = seed

    def item(self, index, turn=None):
        first, second, code = places(self.seed, index)
        said = [f"vault {first}", call(first), f"see {second}", call(second), code, code]
        num_said = 2 * (index % 3 if turn is None else turn) + 1
        prompt = "\n".join(text + "<eos>" * (i % 2) for i, text in enumerate(said[:num_said]))
        return TaskItem(index, prompt, said[num_said])

    def score(self, item, completion):
        return float(completion == item.answer)


def vault(seed):
    return Vault(seed)


def vault_turns(seed):
    return VaultTurns(seed)


def vault_item(index):
    """Return what the program in tool_agent.py is given of an item, with seed 0."""
    item = Vault(0).item(index)
    return {"prompt": item.prompt, "places": dict(item.metadata), "answer": item.answer}
