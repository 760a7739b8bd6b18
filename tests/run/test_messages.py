"""What the run and its ranks say to one another arrives as it was said, or is refused with a reason."""

from __future__ import annotations

import dataclasses
import math
import struct
from pathlib import Path

import pytest
import torch

from inflight.errors import TrainerError
from inflight.run.config import load_config
from inflight.run.ranks.channel import encode
from inflight.run.ranks.messages import (
    Members,
    Message,
    Start,
    Train,
    Trained,
    micro_batches_of,
    tensors_of,
)
from inflight.types import MicroBatch
from tests.channels import answered, asked
from tests.run.runs import CONFIG
from tests.worker.worker_cases import make_batch


def test_a_micro_batch_with_every_optional_tensor_arrives_unchanged() -> None:
    lengths = (9, 4, 17)
    tensors = {
        field.name: torch.randint(99, (sum(lengths),))
        for field in dataclasses.fields(MicroBatch)
        if field.name not in ("segment_lengths", "image_tensors")
    }
    images = {"pixel_values": torch.rand(2, 3, 4, 4), "grid": torch.randint(99, (2, 3))}
    whole, plain = MicroBatch(segment_lengths=lengths, image_tensors=images, **tensors), make_batch((3, 5), seed=0)
    step = Train(segment_lengths=(lengths, (3, 5)), num_groups=1, num_sequences=5, publish=None)
    received, parts = asked(encode(step, tensors_of([whole, plain])))
    assert received == step
    for sent, found in zip((whole, plain), micro_batches_of(step.segment_lengths, parts), strict=True):
        for field in dataclasses.fields(MicroBatch):
            value, other = getattr(sent, field.name), getattr(found, field.name)
            if field.name == "image_tensors":
                assert value.keys() == other.keys()
                assert all(torch.equal(value[name], other[name]) for name in value)
            else:
                assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, field.name


@pytest.mark.parametrize(
    "tensors",
    [{}, {"0.token_ids_T": torch.zeros(2)}, {"0.nonsense_T": torch.zeros(2)}, {"3.token_ids_T": torch.zeros(2)}],
)
def test_tensors_that_make_no_micro_batch_are_refused(tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(TrainerError, match="do not form micro-batches"):
        micro_batches_of([[2]], tensors)


@pytest.mark.parametrize(
    "overrides",
    [
        ("--servers.fleet", '[{ engine = "embedded" }, { engine = "embedded", count = 2, max_concurrent = 8 }]'),
        ("--loss.policy", '{ gate = { kind = "ppo_clip" }, penalties = [{ kind = "kl", coefficient = 0.1 }] }'),
        ("--servers.attach.urls_file", "servers.txt", "--loss.preset", "grpo"),
    ],
)
def test_the_configuration_of_a_run_reaches_its_ranks_as_it_was_written(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(directory=tmp_path, model="models/x"))
    config = load_config(path, overrides)
    start = Start(config=config, run_id="run", members=Members(urls=("http://a:1",)), checkpoint=None, rendezvous="")
    received, _ = asked(encode(start))
    assert received == start
    assert isinstance(received, Start)
    assert received.config.servers.members == config.servers.members
    assert received.config.loss.policy_loss() == config.loss.policy_loss()


def test_numbers_that_are_not_finite_arrive() -> None:
    trained = Trained(
        version=1, gradient_norm=math.nan, learning_rate=0.1, metrics={"a": [-math.inf, 1.0]}, span=(0.0, 1.0)
    )
    received = answered(encode(trained))
    assert isinstance(received, Trained)
    assert math.isnan(received.gradient_norm)
    assert received.metrics == trained.metrics


def frame_of(json: bytes) -> bytes:
    return struct.pack("<Q", len(json)) + json


@pytest.mark.parametrize(
    ("json", "says"),
    [
        (b'{"type":"save","path":"x","colour":1}', "unknown key 'save.colour'"),
        (b'{"type":"save"}', "key 'save.path' is missing"),
        (b'{"type":"dance"}', "'dance' found using 'type' does not match"),
        (b"nonsense", "Invalid JSON"),
    ],
)
def test_a_request_that_cannot_be_read_is_refused_with_its_field(json: bytes, says: str) -> None:
    with pytest.raises(TrainerError, match="the run sent a message that cannot be read") as refused:
        asked(frame_of(json))
    assert says in str(refused.value)


def test_an_answer_that_cannot_be_read_is_refused_with_the_rank() -> None:
    with pytest.raises(TrainerError, match=r"trainer rank 0 sent a message that cannot be read: done\.version"):
        answered(frame_of(b'{"type":"done","version":"x"}'))


def test_messages_are_immutable() -> None:
    kinds = [kind for base in Message.__subclasses__() for kind in (base, *base.__subclasses__())]
    assert all(kind.model_config["frozen"] and kind.model_config["extra"] == "forbid" for kind in kinds)
