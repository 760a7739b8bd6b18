"""The environment of examples/pictures.toml: a picture with squares, to be counted or whose colour is to be named."""

from __future__ import annotations

import random
from typing import Literal

from PIL import Image

from inflight.contracts import Environment, Episode
from inflight.model.images import image_url_of
from inflight.types import TaskItem

COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 70, 230), "yellow": (230, 220, 50)}
SIZE, SIDE = 28, 7
MOST = 4


class Pictures(Environment):
    """One question about a picture of 28 x 28 pixels: how many squares, or of what colour. A right answer gives 1."""

    def __init__(self, seed: int, ask: Literal["colour", "count"] = "colour") -> None:
        self._seed = seed
        self._ask = ask

    @property
    def name(self) -> str:
        return "pictures"

    def item(self, index: int) -> TaskItem:
        rng = random.Random(f"{self._seed}:{index}")
        colour, num = rng.choice(sorted(COLOURS)), rng.randint(1, MOST)
        grey = rng.randint(0, 90)
        picture = Image.new("RGB", (SIZE, SIZE), (grey, grey, grey))
        cells = [(x, y) for x in range(0, SIZE, SIDE) for y in range(0, SIZE, SIDE)]
        for x, y in rng.sample(cells, num):
            picture.paste(COLOURS[colour], (x + 1, y + 1, x + SIDE - 1, y + SIDE - 1))
        question, answer = ("How many?", str(num)) if self._ask == "count" else ("Which colour?", colour)
        return TaskItem(index, question, answer, {"image_url": image_url_of(picture)})

    async def play(self, item: TaskItem, episode: Episode) -> float:
        return await ask(item, episode)


async def ask(item: TaskItem, episode: Episode) -> float:
    """Show the picture of an item and ask its question; a right answer gives 1."""
    picture = {"type": "image_url", "image_url": {"url": item.metadata["image_url"]}}
    question = {"role": "user", "content": [picture, {"type": "text", "text": item.prompt}]}
    reply = await episode.conversation().say(question)
    return float(reply.text.strip() == item.answer)
