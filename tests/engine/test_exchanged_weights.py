"""New weights become the memory of the parameters: a commit copies nothing, and nothing writes to them later."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.engine import Engine
from inflight.engines.embedded.parameters import exchange, prepare_tensors
from inflight.engines.embedded.slot_attention import ATTENTION_NAME, register_slot_attention
from inflight.errors import PublishError
from inflight.model.checkpoints import load_causal_lm
from inflight.weights.encode.transit import ReusedMemory, _Block
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.weights.transports import make_sender
from tests.models import make_model
from tests.weights.lora import lora_of, merged_with
from tests.weights.stored import share_host_memory
from tests.weights.workers import LORA, LoraWorker, PartialWorker, PlainWorker, checkpoint, scaled


def parameters(**tensors: torch.Tensor) -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}


def test_a_tensor_that_fits_becomes_the_parameters_memory() -> None:
    owned = parameters(weight=torch.zeros(8, 16))
    arrived = torch.randn(8, 16)
    exchange(owned, prepare_tensors(owned, [("weight", arrived)]))
    assert owned["weight"].data_ptr() == arrived.data_ptr()
    assert owned["weight"].requires_grad and isinstance(owned["weight"], torch.nn.Parameter)


@pytest.mark.parametrize(
    "arrived",
    [
        torch.randn(8, 16).to(torch.bfloat16),
        torch.randn(16, 8).t(),
        torch.randn(8 * 16 + 1)[1:].view(8, 16),
    ],
    ids=["another dtype", "another layout", "not aligned"],
)
def test_a_tensor_that_does_not_fit_is_copied_beside_the_model(arrived: torch.Tensor) -> None:
    owned = parameters(weight=torch.zeros(8, 16))
    ready = prepare_tensors(owned, [("weight", arrived)])
    assert not owned["weight"].any(), "nothing has changed yet"
    exchange(owned, ready)
    assert owned["weight"].data_ptr() != arrived.data_ptr() and owned["weight"].is_contiguous()
    assert owned["weight"].data_ptr() % 64 == 0
    assert torch.equal(owned["weight"].detach(), arrived.float())


def test_a_tensor_of_another_shape_is_refused_before_anything_changes() -> None:
    owned = parameters(weight=torch.zeros(8, 16))
    with pytest.raises(ValueError, match=r"weight has the shape \(8, 16\), not \(16, 8\)"):
        prepare_tensors(owned, [("weight", torch.ones(16, 8))])


def test_memory_is_used_again_only_once_nothing_refers_to_it() -> None:
    memory = ReusedMemory()
    first = memory.take(4096)
    view, place = first[100:200].view(torch.float32), first.data_ptr()
    del first
    memory.begin()
    second = memory.take(4096)
    assert second.data_ptr() != place, "a view of it is still there"
    del view
    memory.begin()
    assert memory.take(4096).data_ptr() == place


def test_an_engine_that_serves_from_what_arrived_alternates_between_two_pieces_of_memory() -> None:
    memory = ReusedMemory()
    places, served = [], None
    for _ in range(6):
        memory.begin()
        arrived = memory.take(4096)
        places.append(arrived.data_ptr())
        served = arrived  # the memory served before is free from here on
    assert served is not None
    assert places[2:] == [places[0], places[1]] * 2 and places[0] != places[1]


def test_threads_that_take_memory_at_the_same_moment_never_get_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = ReusedMemory()
    memory.take(4096)
    is_free: Any = _Block.is_free.fget

    def slowly(block: _Block) -> bool:
        found = bool(is_free(block))
        time.sleep(0.05)  # long enough for the other thread to look too
        return found

    monkeypatch.setattr(_Block, "is_free", property(slowly))
    taken: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: taken.append(memory.take(4096))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert len({tensor.data_ptr() for tensor in taken}) == 2


def test_memory_that_two_updates_did_not_need_goes_back_to_the_system() -> None:
    memory = ReusedMemory()
    memory.take(4096)
    memory.begin()
    memory.begin()
    assert len(memory._blocks) == 1
    memory.begin()
    assert memory._blocks == []


class Served:
    """An embedded engine, and a publisher over one transport."""

    def __init__(self, path: Path, transport: str, directory: Path, **options: Any) -> None:
        register_slot_attention()
        self.model: Any = load_causal_lm(path, attention=ATTENTION_NAME)
        self.endpoint = EmbeddedEndpoint(
            Engine(self.model, max_model_len=256, max_concurrent=4), self.model, name="local"
        )
        stored = directory if transport in ("file", "http") else None
        self.publisher = WeightPublisher([self.endpoint], make_sender(transport, directory=stored), **options)

    def publish(self, worker: Any) -> None:
        publish_weights(worker, self.publisher, deadline_s=20.0, bucket_bytes=10_000)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def assert_holds(self, tensors: dict[str, torch.Tensor]) -> None:
        held = self.tensors()
        assert [name for name in held if not torch.equal(held[name], tensors[name])] == []


@pytest.fixture(params=["gloo", "shm", "ipc", "file", "http", "gloo and delta", "shm and delta", "ipc and delta"])
def served(
    request: pytest.FixtureRequest, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Served]:
    """``ipc`` shares the host's memory here."""
    transport, _, delta = request.param.partition(" and ")
    if transport == "ipc":
        share_host_memory(monkeypatch.setattr)
    made = Served(model_dir, transport, tmp_path, run_id="here", delta=bool(delta))
    with made.publisher:
        yield made


def with_each_seventh_raised(tensor: torch.Tensor, by: float) -> torch.Tensor:
    """So few changes that a delta is worth its while."""
    return tensor + by * (torch.arange(tensor.numel()) % 7 == 0).view(tensor.shape)


def test_later_updates_leave_what_is_served_alone_until_they_are_committed(served: Served, model_dir: Path) -> None:
    first = checkpoint(model_dir)
    for version in range(1, 6):
        tensors = {name: with_each_seventh_raised(tensor, version) for name, tensor in first.items()}
        served.publish(PlainWorker(tensors, version))
        served.assert_holds(tensors)

        def fail(index: int, last: int = version) -> None:
            if index == 3:
                raise RuntimeError(f"the trainer fails after version {last}")

        with pytest.raises((PublishError, RuntimeError)):
            served.publish(PlainWorker(scaled(tensors, 1.5), version + 1, fail))
        served.assert_holds(tensors)


def test_partial_updates_and_loras_leave_the_rest_as_it_is(served: Served, model_dir: Path) -> None:
    whole = checkpoint(model_dir)
    for version, word in enumerate(("q_proj", "norm"), 1):
        sent = {name: 1.25 * tensor for name, tensor in whole.items() if word in name}
        served.publish(PartialWorker(sent, version, whole))
        whole = {**whole, **sent}
        served.assert_holds(whole)
    lora = lora_of(whole, ["q_proj", "up_proj"], LORA.rank, seed=1)
    served.publish(LoraWorker(lora, 3))
    for name, tensor in merged_with(whole, lora, LORA).items():
        torch.testing.assert_close(served.tensors()[name], tensor, msg=name)
    sent = {name: 0.5 * tensor for name, tensor in whole.items() if "q_proj" in name}
    served.publish(PartialWorker(sent, 4, whole))
    served.assert_holds({**whole, **sent})


def test_memory_that_was_replaced_is_let_go(served: Served, model_dir: Path) -> None:
    for version in (1, 2):
        served.publish(PlainWorker(scaled(checkpoint(model_dir), 1.0 + version), version))
        assert served.endpoint._engine.weights.replaced == []


def test_tied_parameters_share_what_arrived(tmp_path: Path) -> None:
    path = make_model(tmp_path / "tied", tied=True)
    served = Served(path, "gloo", tmp_path, run_id="tied")
    with served.publisher:
        tensors = scaled({name: tensor.detach().clone() for name, tensor in served.tensors().items()}, 1.5)
        served.publish(PlainWorker(tensors, 1))
        served.assert_holds(tensors)
        head, embedding = served.model.get_output_embeddings(), served.model.get_input_embeddings()
        assert head.weight is embedding.weight
        assert head.weight.data_ptr() == served.tensors()["model.embed_tokens.weight"].data_ptr()
