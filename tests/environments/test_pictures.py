"""The pictures of the examples: a model that sees learns from them, through every part of a run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from inflight.contracts import Environment
from inflight.engines.embedded.tiny_images import picture_message
from inflight.model.images import decoded
from inflight.rollouts.tasks import load_task
from tests.run.runs import RunProcess
from tests.zygote import python

ROOT = Path(__file__).parents[2]


def test_the_answer_is_in_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    environment = load_task("pictures:Pictures", {"ask": "colour"}, 0)
    assert isinstance(environment, Environment)
    colours = set()
    for index in range(20):
        item = environment.item(index)
        assert item == environment.item(index)
        image = decoded(picture_message(item)["content"][0]["image_url"]["url"])
        shown = {pixel for _, pixel in image.getcolors() if len(set(pixel)) > 1}  # the background is grey
        assert len(shown) == 1
        colours.add((item.answer, *shown))
    assert len(colours) == 4


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_a_tiny_model_learns_what_it_sees(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("src", "examples"))}
    model = tmp_path / "pictures"
    made = ("--images", "--task", "pictures:Pictures", "--wrong-fraction", "0.5", "--steps", "150")
    subprocess.run(
        [python(), "-m", "inflight", "tiny-model", str(model), *made],
        check=True,
        timeout=600,
        env={**os.environ, **environment},
    )
    run = RunProcess(tmp_path, model, environment=environment, config=ROOT / "examples" / "pictures.toml")
    assert run.wait(timeout_s=900) == 0, run.output()
    assert run.summary()["last_reward"] > run.summary()["first_reward"] + 0.3
