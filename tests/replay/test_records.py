"""A record says again what was written, or indicates which file is damaged."""

from __future__ import annotations

import base64
import json
import resource
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from inflight.errors import CheckpointError, ConfigError
from inflight.observe.trace.digests import weights_digest
from inflight.observe.trace.records import (
    MANIFEST,
    RecordManifest,
    RecordWriter,
    item_details,
    pieces_of,
    read_manifest,
    read_step,
    read_steps,
    record_of,
    remove_steps,
    versions_of,
)
from inflight.observe.trace.steps import RecordedStep, StepOutcome, join_step, split_step
from inflight.types import Group, Rollout, Sample, TeacherScores, Turn
from inflight.wire import PromptImage, RoutedExperts, VersionSpan

FLOATS = st.floats(width=32, allow_nan=False)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=12)
IMAGE = PromptImage(url="data:image/png;base64,AAAA", start=0, num_tokens=1)


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    completion = draw(IDS)
    length = len(completion)
    borders = sorted(draw(st.sets(st.integers(0, length), max_size=4)))
    spans = [
        VersionSpan(version=draw(st.integers(0, 9)), start=start, end=end)
        for start, end in zip(borders[::2], borders[1::2], strict=False)
    ]
    experts = draw(st.none() | st.sampled_from(["uint8", "uint16"]))
    rows = np.arange(12, dtype=experts or "uint8").reshape(3, 2, 2)
    return Rollout(
        prompt_token_ids=draw(IDS),
        completion_token_ids=completion,
        behaviour_logprobs=draw(st.lists(FLOATS, min_size=length, max_size=length)),
        version_spans=tuple(spans),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        reward=draw(st.floats(allow_nan=False)),
        temperature=draw(st.floats(0.1, 2)),
        turns=tuple(Turn(0, length, reward) for reward in draw(st.lists(st.none() | st.floats(0, 1), max_size=2))),
        episode=draw(st.none() | st.integers(0, 3)),
        role=draw(st.text(max_size=3)),
        images=(IMAGE,) * draw(st.integers(0, 1)),
        routed_experts=None
        if experts is None
        else RoutedExperts(
            num_tokens=3,
            num_layers=2,
            num_chosen=2,
            dtype=experts,  # type: ignore[arg-type]
            data=base64.b64encode(rows.tobytes()).decode(),
        ),
        teacher=draw(st.none() | teachers(length)),
    )


@st.composite
def teachers(draw: st.DrawFn, length: int) -> TeacherScores:
    """What the trainer ranks compute, or what a server answers, with or without its likeliest tokens."""
    if draw(st.booleans()):
        return TeacherScores(teacher=draw(st.integers(0, 3)))
    num_top = draw(st.integers(0, 2)) if length else 0
    ids, top = [[5, 6][:num_top]] * length, [[-0.5, -2.0][:num_top]] * length
    more = {"top_token_ids": ids, "top_logprobs": top} if num_top else {}
    return TeacherScores(teacher=1, logprobs=[-0.25] * length, **more)


@st.composite
def steps(draw: st.DrawFn) -> RecordedStep:
    groups = [
        Group(number, number * 7, draw(st.lists(rollouts(), max_size=3)), draw(st.text(max_size=4)))
        for number in range(draw(st.integers(0, 3)))
    ]
    every = [(index, rollout) for index, group in enumerate(groups) for rollout in group.rollouts]
    has_references, has_logprobs = draw(st.booleans()), draw(st.booleans())

    def per_token(rollout: Rollout, values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=len(rollout.completion_token_ids), max_size=rollout.num_tokens))[
            : len(rollout.completion_token_ids)
        ]

    samples = [
        Sample(
            replace(rollout, reward=0.5) if draw(st.booleans()) else rollout,  # as a composer may make it
            per_token(rollout, FLOATS),
            per_token(rollout, st.booleans()),
            per_token(rollout, FLOATS) if has_references else None,
            index,
        )
        for index, rollout in every
        if draw(st.booleans())
    ]
    logprobs = [per_token(sample.rollout, FLOATS) for sample in samples] if has_logprobs else None
    outcome = draw(
        st.none() | st.builds(StepOutcome, gradient_norm=st.floats(), learning_rate=FLOATS, metrics=st.just(()))
    )
    return RecordedStep(draw(st.integers(0, 10**9)), groups, samples, logprobs, outcome)


@settings(max_examples=30)
@given(steps())
def test_a_step_comes_back_as_it_was(step: RecordedStep) -> None:
    facts, arrays = split_step(step)
    again = join_step(type(facts).model_validate_json(facts.model_dump_json()), arrays)
    assert repr(again) == repr(step)  # NaN is not equal to itself
    kept = {id(rollout) for group in step.groups for rollout in group.rollouts}
    assert {id(rollout) for group in again.groups for rollout in group.rollouts}.isdisjoint(kept)


def example(version: int = 0, reward: float = 1.0) -> RecordedStep:
    rollout = Rollout([104, 105], [72, 105, 33], [-0.5, 0.0, -0.25], spans((0, 1, 0), (2, 3, 1)), "stop", reward, 1.0)
    other = replace(rollout, reward=0.0)
    sample = Sample(rollout, [1.0, 0.0, 1.0], [True, False, True])
    outcome = StepOutcome(gradient_norm=0.1, learning_rate=1e-3, metrics=({"ratio": [2.0, 2.0]},))
    return RecordedStep(version, [Group(4, 17, [rollout, other], "a")], [sample], [[-0.5, 0.0, -0.125]], outcome)


def spans(*parts: tuple[int, int, int]) -> Sequence[VersionSpan]:
    return tuple(VersionSpan(start=start, end=end, version=version) for start, end, version in parts)


@pytest.fixture
def record(tmp_path: Path) -> Path:
    writer = RecordWriter(tmp_path / "run" / "record")
    writer.begin(RecordManifest(config={"run": {"seed": 3}}))
    for version in range(3):
        writer.write_step(example(version))
    return writer.directory


def test_a_record_is_read_from_a_run_directory_or_by_itself(record: Path) -> None:
    assert record_of(record) == record_of(record.parent) == record
    assert read_manifest(record).config == {"run": {"seed": 3}}
    assert [step.version for step in read_steps(record)] == [0, 1, 2]
    assert repr(read_step(record, 2)) == repr(example(1))
    with pytest.raises(ConfigError, match=r"contains no record: pass the directory of a run with run.record"):
        record_of(record.parent.parent)


def test_steps_after_a_checkpoint_are_removed_with_what_a_killed_process_left(record: Path) -> None:
    (record / "step-000004.partial").write_bytes(b"half")
    remove_steps(record, 1)
    assert [path.name for path in sorted(record.iterdir())] == [MANIFEST, "step-000001.safetensors"]
    remove_steps(record.parent / "none", 0)  # a run that has recorded nothing


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_step_that_is_cut_off_is_named(record: Path, size: int) -> None:
    path = record / "step-000002.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ConfigError, match=r"step-000002.safetensors' is not a recorded step, or is damaged"):
        list(read_steps(record))


def test_a_step_whose_parts_do_not_fit_is_refused(record: Path) -> None:
    facts, arrays = split_step(example())
    for changed in (
        {**arrays, "advantages": arrays["advantages"][:-1]},
        {name: array for name, array in arrays.items() if name != "loss_mask"},
    ):
        save_file(changed, record / "step-000001.safetensors", {"step": facts.model_dump_json()})
        with pytest.raises(ConfigError, match="is damaged"):
            read_step(record, 1)
    save_file(arrays, record / "step-000001.safetensors", {"step": '{"version": "x"}'})
    with pytest.raises(ConfigError, match="version: Input should be a valid integer"):
        read_step(record, 1)
    save_file(arrays, record / "step-000001.safetensors")
    with pytest.raises(ConfigError, match="is damaged"):
        read_step(record, 1)


def test_a_missing_or_renamed_step_is_told(record: Path) -> None:
    (record / "step-copy.safetensors").touch()
    assert versions_of(record) == [1, 2, 3]
    (record / "step-000002.safetensors").rename(record / "step-000005.safetensors")
    with pytest.raises(ConfigError, match="has no step between versions 1 and 3"):
        list(read_steps(record))
    with pytest.raises(ConfigError, match="contains the step to version 2: the file was renamed"):
        read_step(record, 5)
    with pytest.raises(ConfigError, match="has no step that produced version 9"):
        read_step(record, 9)


def test_a_record_of_a_newer_format_or_none_at_all_is_refused(record: Path) -> None:
    manifest = json.loads((record / MANIFEST).read_text())
    (record / MANIFEST).write_text(json.dumps({**manifest, "format_version": 2, "inflight": "9.0"}))
    with pytest.raises(ConfigError, match=r"written by inflight 9\.0 in record format 2"):
        read_manifest(record)
    for text in ("{", "[]", '{"format": "other", "format_version": 1}'):
        (record / MANIFEST).write_text(text)
        with pytest.raises(ConfigError, match="is not the manifest of a record"):
            read_manifest(record)


def test_a_full_disk_is_told_and_leaves_earlier_steps(record: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # fails writes as a full disk does
    try:
        with pytest.raises(
            CheckpointError, match=r"step-000004.safetensors' cannot be written: .*Check the free space"
        ):
            RecordWriter(record).write_step(example(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert versions_of(record) == [1, 2, 3]
    assert not list(record.glob("*.partial"))


def test_an_item_is_told_token_by_token(record: Path) -> None:
    told = item_details(record, 1, 17, lambda token_ids: bytes(token_ids).decode())
    assert json.loads(json.dumps(told)) == told
    first, second = told["rollouts"]
    assert first["prompt"] == {"token_ids": [104, 105], "pieces": ["h", "i"]}
    assert first["completion"] == {
        "token_ids": [72, 105, 33],
        "pieces": ["H", "i", "!"],
        "versions": [0, None, 1],
        "behaviour_logprobs": [-0.5, None, -0.25],
        "trainer_logprobs": [-0.5, None, -0.125],
        "advantages": [1.0, None, 1.0],
        "loss_mask": [True, False, True],
    }
    assert second["completion"]["advantages"] is None  # the step left it out
    assert item_details(record, 1, 17)["rollouts"][0]["prompt"]["pieces"] is None
    with pytest.raises(ConfigError, match=r"did not train on item 3: its items are \[17\]"):
        item_details(record, 1, 3)


@given(st.text(max_size=20))
def test_pieces_join_to_the_text(text: str) -> None:
    ids = [*text.encode()]
    pieces = pieces_of(lambda token_ids: bytes(token_ids).decode(errors="replace"), ids)
    assert "".join(pieces) == text
    assert len(pieces) == len(ids)


def test_a_digest_of_weights_depends_on_neither_files_nor_their_order(tmp_path: Path) -> None:
    tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.ones(2, np.float16)}
    for name, files in {"whole": [tensors], "cut": [{"a": tensors["a"]}, {"b": tensors["b"]}]}.items():
        (tmp_path / name).mkdir()
        for number, part in enumerate(files):
            save_file(part, tmp_path / name / f"model-{number}.safetensors")
    assert weights_digest(tmp_path / "whole") == weights_digest(tmp_path / "cut")
    assert weights_digest(tmp_path / "whole")[1] == 28
    tensors["a"][1] = 2
    save_file(tensors, tmp_path / "whole" / "model-0.safetensors")
    assert weights_digest(tmp_path / "whole")[0] != weights_digest(tmp_path / "cut")[0]
    (tmp_path / "cut" / "model-0.safetensors").write_bytes(b"12345678{")
    with pytest.raises(ConfigError, match="is not a safetensors file"):
        weights_digest(tmp_path / "cut")
