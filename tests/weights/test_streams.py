"""Streams: nothing on the CPU; on a GPU, in what order torch is asked, which a recorder of its calls shows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from inflight.weights.encode import transit
from inflight.weights.encode.transit import (
    finished_on_weight_stream,
    on_weight_stream,
    record_event,
    synchronise_device,
    synchronise_stream,
)

GPU = torch.device("cuda", 0)


class Recorder:
    """Stands for torch's streams and events, on a machine without a GPU."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.current = Stream(self, "theirs")

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class Stream:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder = recorder
        self._name = name

    def record_event(self) -> Any:
        self._recorder.calls.append(f"event on {self._name}")
        return Event(self._recorder, self._name)

    def wait_event(self, event: Event) -> None:
        self._recorder.calls.append(f"{self._name} waits for {event.name}")


class Event:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder = recorder
        self.name = name

    def synchronize(self) -> None:
        self._recorder.calls.append(f"the host waits for {self.name}")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recorder = Recorder()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(recorder, "ours"))
    monkeypatch.setattr(torch.cuda, "stream", recorder.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: recorder.current)
    transit._stream.cache_clear()
    yield recorder
    transit._stream.cache_clear()


def test_the_host_waits_for_our_stream_which_waits_for_the_event_and_never_for_theirs(recorder: Recorder) -> None:
    packed = record_event(GPU)
    with finished_on_weight_stream(GPU, after=packed):
        recorder.calls.append("receive")
    assert recorder.calls == [
        "event on theirs",
        "ours waits for theirs",
        "receive",
        "event on ours",
        "the host waits for ours",
    ]
    assert recorder.current._name == "theirs"


def test_what_is_only_queued_is_not_waited_for(recorder: Recorder) -> None:
    with on_weight_stream(GPU):
        recorder.calls.append("receive")
    assert recorder.calls == ["receive"]


def test_after_an_error_nothing_is_waited_for(recorder: Recorder) -> None:
    with pytest.raises(RuntimeError), finished_on_weight_stream(GPU):
        raise RuntimeError("the group was abandoned")
    assert recorder.calls == []


def test_a_load_is_finished_on_the_stream_of_whoever_loads(recorder: Recorder) -> None:
    synchronise_stream(GPU)
    assert recorder.calls == ["event on theirs", "the host waits for theirs"]


def test_everything_that_is_queued_is_waited_for_on_all_streams(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: recorder.calls.append(f"the host waits for {device}"))
    synchronise_device(torch.device("cpu"))
    synchronise_device(GPU)
    assert recorder.calls == ["the host waits for cuda:0"]


def test_on_the_cpu_nothing_is_done(recorder: Recorder) -> None:
    cpu = torch.device("cpu")
    assert record_event(cpu) is None
    synchronise_stream(cpu)
    with finished_on_weight_stream(cpu), on_weight_stream(cpu):
        pass
    assert recorder.calls == []
