"""What an SGLang server is known to have loaded, and what a LoRA means for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from inflight.errors import UpdateRefusedError
from inflight.weights.encode.buckets import plan_buckets
from inflight.weights.encode.lora_tensors import lora_names
from inflight.wire import InFlightPolicy, Manifest, UpdateRef, WeightUpdate
from inflight_sglang.loaded_weights import LoadedWeights
from tests.weights.workers import LORA, PlainWorker

BASE = {name: torch.randn(3, 2) for name in ("m.weight", "n.weight")}


class Server:
    """What is served, and who loads it."""

    def __init__(self, directory: Path) -> None:
        self.served: UpdateRef | None = None
        self.is_torn = False
        self.loaded = LoadedWeights(directory, "float32", lambda: (self.served, self.is_torn))

    def load(
        self, tensors: dict[str, torch.Tensor], version: int, *, lora: bool = False, keep: bool = False
    ) -> set[str]:
        """Go through one update to its end; return the names that are loaded in addition to what arrived."""
        specs = PlainWorker(tensors).parameter_specs()
        frozen = () if lora else tuple(name for name in BASE if name not in tensors)
        update = WeightUpdate(
            run_id="run",
            version=version,
            manifest=Manifest(tensors=tuple(specs), frozen=frozen, lora=LORA if lora else None),
            buckets=tuple(plan_buckets(specs)),
            keep=keep,
            in_flight=InFlightPolicy.KEEP,
            deadline_s=1.0,
            lease_s=1.0,
        )
        self.loaded.begin(update)
        arrived = list(tensors.items())
        more = self.loaded.prepare(update, arrived)
        self.loaded.note_committed(arrived)
        self.served = update.ref
        return {name for name, _ in more}


@pytest.fixture
def server(tmp_path: Path) -> Server:
    save_file(BASE, tmp_path / "model.safetensors")
    return Server(tmp_path)


def lora(*modules: str) -> dict[str, torch.Tensor]:
    shapes = ((4, 2), (3, 4))
    return {name: torch.ones(shape) for m in modules for name, shape in zip(lora_names(m), shapes, strict=True)}


def test_a_lora_is_merged_into_the_checkpoint_and_taken_out_by_what_follows(server: Server) -> None:
    assert server.load(lora("m"), 1, lora=True) == {"m.weight"}
    assert server.load(lora("n"), 2, lora=True) == {"m.weight", "n.weight"}
    assert server.load({"m.weight": torch.zeros(3, 2)}, 3, keep=True) == {"n.weight"}
    assert server.load(lora("m"), 4, lora=True) == {"m.weight"}
    assert server.load(BASE, 5) == set()


def test_a_lora_needs_weights_that_were_kept_and_a_server_that_starts_again_has_its_checkpoint(
    server: Server,
) -> None:
    server.load(BASE, 1)
    with pytest.raises(UpdateRefusedError, match=r"keep_base=True: .* 1 tensors .*m\.weight"):
        server.load(lora("m"), 2, lora=True)
    server.served = None
    assert server.load(lora("m"), 2, lora=True) == {"m.weight"}


def test_what_another_process_had_loaded_is_not_known_until_all_is_sent(server: Server) -> None:
    server.load(lora("m"), 1, lora=True)
    server.served = UpdateRef(run_id="theirs", version=1)
    with pytest.raises(UpdateRefusedError, match=r"another process had version 1 loaded.*keep_base=True"):
        server.load(lora("m"), 2, lora=True)
    assert server.load({"m.weight": torch.zeros(3, 2)}, 2) == set()
    server.served = UpdateRef(run_id="theirs", version=1)
    server.load(BASE, 3, keep=True)
    assert server.load(lora("m"), 4, lora=True) == {"m.weight"}


def test_an_update_that_failed_while_it_was_loaded_loses_nothing_that_is_known(server: Server) -> None:
    server.load(lora("m"), 1, lora=True)
    specs = PlainWorker(BASE).parameter_specs()
    manifest, buckets = Manifest(tensors=tuple(specs)), tuple(plan_buckets(specs))
    torn = WeightUpdate(
        run_id="run",
        version=2,
        manifest=manifest,
        buckets=buckets,
        in_flight=InFlightPolicy.KEEP,
        deadline_s=1.0,
        lease_s=1.0,
    )
    server.loaded.begin(torn)
    server.loaded.prepare(torn, list(BASE.items()))
    server.served, server.is_torn = torn.ref, True  # as its label says
    assert server.load({"n.weight": torch.zeros(3, 2)}, 3, keep=True) == {"m.weight"}


def test_a_version_that_was_tried_here_and_loaded_by_another_process_is_not_known(server: Server) -> None:
    server.load(BASE, 1, keep=True)
    specs = PlainWorker(BASE).parameter_specs()
    manifest, buckets = Manifest(tensors=tuple(specs)), tuple(plan_buckets(specs))
    ended = WeightUpdate(
        run_id="run",
        version=2,
        manifest=manifest,
        buckets=buckets,
        in_flight=InFlightPolicy.KEEP,
        deadline_s=1.0,
        lease_s=1.0,
    )
    server.loaded.begin(ended)
    server.served = ended.ref  # whole, and not by this process
    with pytest.raises(UpdateRefusedError, match="another process had version 2 loaded"):
        server.load(lora("m"), 3, lora=True)


def test_a_version_that_another_session_of_another_process_brought_again_is_not_known(server: Server) -> None:
    server.load(BASE, 1, keep=True)
    assert server.served is not None
    server.served = server.served.model_copy(update={"session_id": "another"})
    with pytest.raises(UpdateRefusedError, match="another process had version 1 loaded"):
        server.load(lora("m"), 2, lora=True)
