"""Updates that the servers of the dialects refuse or cannot apply: nothing changes, and a pause stays in force."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient

from inflight.dialects.serving import DialectRoutes
from inflight.dialects.sglang.app import sglang_app
from tests.dialects.programs import Program
from tests.dialects.test_engine_routes import Client, Start, adapter_of, start, written  # noqa: F401
from tests.gates import wait_until
from tests.servers import ServerProcess
from tests.weights.workers import assert_serves, checkpoint, weight_version

Faulty = Callable[..., tuple[Client, ServerProcess]]
MODEL, ADAPTER, INDEX = "model.safetensors", "adapter_model.safetensors", "model.safetensors.index.json"


def moved(file: Path, elsewhere: Path) -> None:
    """Move a file, and put a symbolic link to it in its place."""
    elsewhere.mkdir(exist_ok=True)
    target = elsewhere / f"{file.parent.name}-{file.name}"
    file.symlink_to(shutil.move(file, target))


def sharded(model: Path, directory: Path, *, index: bool = True) -> Path:
    """Write a checkpoint in two files."""
    directory.mkdir()
    shutil.copy(model / "config.json", directory)
    tensors = checkpoint(model)
    names = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in tensors if names[name] == file}, directory / file)
    if index:
        (directory / INDEX).write_text(json.dumps({"weight_map": names}))
    return directory


def odd_files(model: Path, updates: Path, outside: Path) -> dict[str, str]:
    """Write directories with files that must not be opened; return why each of them is refused."""
    for name in ("linked", "config", "fifo", "dangling", "loop", "folder"):
        written(model, updates / name)
    moved(updates / "linked" / MODEL, outside)
    moved(updates / "config" / "config.json", outside)
    for name in ("fifo", "dangling", "loop", "folder"):
        (updates / name / MODEL).unlink()
    os.mkfifo(updates / "fifo" / MODEL)
    (updates / "dangling" / MODEL).symlink_to("nothing")
    (updates / "loop" / MODEL).symlink_to(MODEL)
    (updates / "folder" / MODEL).mkdir()
    moved(sharded(model, updates / "shard") / "model-1.safetensors", outside)
    moved(sharded(model, updates / "index") / INDEX, outside)
    os.mkfifo(sharded(model, updates / "unlisted") / "other.safetensors")
    sharded(model, updates / "unfinished", index=False)
    odd = dict.fromkeys(("linked", "config", "shard", "index"), "symbolic link to a file outside")
    odd |= dict.fromkeys(("fifo", "folder", "unlisted"), "not a regular file")
    return odd | {"dangling": "cannot be read", "loop": "cannot be read", "unfinished": f"no {INDEX}"}


@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
def test_files_outside_the_directory_and_files_that_are_not_regular_are_not_opened(
    protocol: str,
    start: Start,  # noqa: F811
    shared_server: ServerProcess,
    model_dir: Path,
    tmp_path: Path,
) -> None:
    client, updates = start(model_dir, shared_server, protocol=protocol), tmp_path / "updates"
    before = weight_version(shared_server).version
    route, key = {"vllm": ("/update_weights", "weight_dir"), "sglang": ("/update_weights_from_disk", "model_path")}[
        protocol
    ]
    for name, why in odd_files(model_dir, updates, tmp_path / "outside").items():
        answer = client.post(route, {key: name}, status=400)
        assert why in (answer["error"]["message"] if protocol == "vllm" else answer["message"]), (name, answer)
    if protocol == "vllm":
        for name, file, why in (
            ("weights", ADAPTER, "link to a file outside"),
            ("settings", "adapter_config.json", "link to a file outside"),
            ("pipe", ADAPTER, "regular"),
        ):
            path = Path(adapter_of(model_dir, updates / name, 0.5)) / file
            moved(path, tmp_path / "outside")
            if name == "pipe":
                path.unlink()
                os.mkfifo(path)
            answer = client.post("/load_lora_adapter", {"lora_name": name, "lora_path": name}, status=400)
            assert why in answer["error"]["message"], (name, answer)
    assert client.get("/health")["ok"] and weight_version(shared_server).version == before


def test_links_within_the_directory_and_shards_with_an_index_are_read(
    start: Start,  # noqa: F811
    start_server: Callable[..., ServerProcess],
    model_dir: Path,
    tmp_path: Path,
) -> None:
    server, updates = start_server(model_dir), tmp_path / "updates"
    client = start(model_dir, server)
    moved(sharded(model_dir, updates / "step") / "model-1.safetensors", updates / "blobs")
    client.post("/update_weights", {"weight_dir": "step"})
    assert_serves(server, 1)


def odd_adapters(model: Path, updates: Path) -> dict[str, str]:
    """Write LoRAs that cannot be merged; return why each of them is refused."""

    def adapter(name: str, change: Callable[[dict[str, torch.Tensor]], Any], **settings: Any) -> None:
        directory = Path(adapter_of(model, updates / name, 0.5))
        tensors = load_file(directory / ADAPTER)
        change(tensors)
        save_file(tensors, directory / ADAPTER)
        config = json.loads((directory / "adapter_config.json").read_text()) | settings
        (directory / "adapter_config.json").write_text(json.dumps(config))

    a, b = sorted(load_file(Path(adapter_of(model, updates / "whole", 0.5)) / ADAPTER))
    adapter("half", lambda it: it.pop(b))
    adapter("rank", lambda it: None, r=3)
    adapter("product", lambda it: it.update({a: it[a][:, :5].contiguous()}))
    adapter("elsewhere", lambda it: it.update({k.replace("down_proj", "odd_proj"): it.pop(k) for k in (a, b)}))
    adapter("stray", lambda it: None, target_modules=["q_proj", "wn_proj"])
    adapter("integers", lambda it: it.update({b: it[b].int()}))
    adapter("infinite", lambda it: it[a].fill_(torch.inf))
    adapter("name", lambda it: it.update({"x" * 1100: it[a].clone()}))
    return {
        "half": "do not form pairs",
        "rank": "do not have rank 3",
        "product": "do not have the shapes of their weights",
        "elsewhere": "odd_proj",
        "stray": "target_modules",
        "integers": "dtype that cannot be used",
        "infinite": "not finite",
        "name": "1024",
    }


def test_a_refused_lora_changes_neither_the_weights_nor_the_pause_nor_a_label(
    start: Start,  # noqa: F811
    start_server: Callable[..., ServerProcess],
    model_dir: Path,
    tmp_path: Path,
) -> None:
    server = start_server(model_dir)
    client = start(model_dir, server)
    client.post("/pause", mode="keep")
    for name, why in odd_adapters(model_dir, tmp_path / "updates").items():
        answer = client.post("/load_lora_adapter", {"lora_name": name, "lora_path": name}, status=400)
        assert why in answer["error"]["message"], (name, answer)
        assert client.get("/is_paused") == {"is_paused": True}
    assert (weight_version(server).state, weight_version(server).version) == ("paused", 0)
    written(model_dir, tmp_path / "updates" / "step")
    assert client.post("/update_weights", {"weight_dir": "step"})["weight_version"] == "1"
    assert client.get("/weight_info") == {"weight_version": "1"}
    assert client.sample()["weight_versions"] == [{"version": "1", "start": 0, "end": 4}]


@pytest.fixture
def faulty(start_server: Callable[..., ServerProcess], model_dir: Path, tmp_path: Path) -> Iterator[Faulty]:
    """Start the dialect with a fault in front of a server."""
    programs = []

    def begin(fault: str, *options: str) -> tuple[Client, ServerProcess]:
        server = start_server(model_dir)
        (tmp_path / "updates").mkdir(exist_ok=True)
        arguments = [fault, server.url, "--port", "0", "--directory", str(tmp_path / "updates")]
        arguments += ["--model", str(model_dir), *options]
        program = Program(tmp_path / "faulty.log", "tests.dialects.four_phase_server", *arguments)
        programs.append(program)
        return Client(program.line_with("routes at").split(" at ")[1].split(",")[0], program), server

    yield begin
    for program in programs:
        program.stop()


@pytest.mark.parametrize("is_paused", [True, False])
def test_a_publish_that_fails_leaves_no_label_and_keeps_the_pause(
    is_paused: bool, faulty: Faulty, model_dir: Path, tmp_path: Path
) -> None:
    for name in ("lost", "found"):
        written(model_dir, tmp_path / "updates" / name)
    adapter_of(model_dir, tmp_path / "updates" / "lora", 0.5)
    client, server = faulty("lost-file")
    if is_paused:
        client.post("/pause", mode="keep")
    for route, body in (
        ("/update_weights", {"weight_dir": "lost", "weight_version": "refused"}),
        ("/load_lora_adapter", {"lora_path": "lora", "lora_name": "refused"}),
    ):
        assert "is gone" in client.post(route, body, status=400)["error"]["message"]
        assert client.get("/is_paused") == {"is_paused": is_paused}
        assert weight_version(server).state == ("paused" if is_paused else "ready")
        assert client.get("/weight_info") == {"weight_version": "default"}
    assert client.post("/update_weights", {"weight_dir": "found"})["weight_version"] == "1"
    assert client.get("/weight_info") == {"weight_version": "1"}
    assert [card["id"] for card in client.get("/v1/models")["data"]] == ["tiny"]


def test_every_phase_of_an_update_renews_its_lease_and_the_update_ends_with_the_lease(
    faulty: Faulty, model_dir: Path, tmp_path: Path
) -> None:
    written(model_dir, tmp_path / "updates" / "step")
    client, server = faulty("no-slack", "--pause-lease", "2")
    info = {"update_info": {"weight_dir": "step"}}
    client.post("/pause", mode="keep")
    client.post("/start_weight_update")
    began = time.monotonic()
    while time.monotonic() < began + 2.5:  # longer than the lease, and each call follows the last one at once
        client.post("/update_weights", info)
    assert client.get("/is_paused") == {"is_paused": True}
    assert weight_version(server).state == "paused"
    wait_until(lambda: not client.get("/is_paused")["is_paused"])
    assert "lease of 2 s" in client.post("/update_weights", info, status=400)["error"]["message"]
    client.post("/start_weight_update")
    assert "already" in client.post("/start_weight_update", status=409)["error"]["message"]
    client.post("/update_weights", info)
    client.post("/finish_weight_update")
    assert_serves(server, 1)


def test_the_calls_around_sglangs_updates_renew_the_lease_of_a_pause() -> None:
    renewed = []

    async def renew() -> None:
        renewed.append(True)

    updates: Any = SimpleNamespace(renew=renew)
    client = TestClient(sglang_app([], token=None, updates=updates))
    for route in ("/begin_weight_update", "/end_weight_update", "/flush_cache"):
        assert client.post(route).json()["success"]
    assert len(renewed) == 2


def test_an_unexpected_error_is_answered_with_an_error_object() -> None:
    async def fail(_: Request) -> Response:
        raise OSError("no such file")

    served = DialectRoutes()
    served.add("GET", "/odd", fail)
    answer = TestClient(served.app(), raise_server_exceptions=False).get("/odd")
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "/odd failed: OSError: no such file"
