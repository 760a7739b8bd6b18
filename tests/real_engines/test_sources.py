"""What the plug-in in vLLM takes beside a process group: files of bytes and safetensors files, whole or damaged."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from inflight.errors import ProtocolError
from inflight.http.connection import HttpConnection
from inflight_vllm.updates import VllmRoutes
from tests.real_engines.servers import RealEngine, is_uniform, logprobs, muted, publish, request, run, running
from tests.weights.workers import PlainWorker

VOCAB_SIZE = 258


@pytest.fixture(scope="module")
def vllm(tiny_model: Path) -> Iterator[RealEngine]:
    with running("vllm", tiny_model) as engine:
        yield engine


def update(engine: RealEngine, tensors: Mapping[str, torch.Tensor], **source: Any) -> list[dict[str, Any]]:
    """Bring one bucket by vLLM's own routes, load what was staged; return what the plug-in said before that."""

    @contextlib.asynccontextmanager
    async def connected() -> AsyncIterator[VllmRoutes]:
        http = HttpConnection(engine.process.url)
        try:
            yield VllmRoutes(http, engine.process.url, {}, 30.0)
        finally:
            await http.aclose()

    async def main() -> list[dict[str, Any]]:
        try:
            async with connected() as routes:
                await routes.post("/pause?mode=keep&clear_cache=true")
                await routes.post("/start_weight_update")
                specs = [spec.model_dump() for spec in PlainWorker(tensors).parameter_specs()]
                await routes.post("/update_weights", {"update_info": {"tensors": specs, **source}})
                while (said := await routes.status(0.1))[0]["phase"] == "busy":
                    pass
                await routes.post("/finish_weight_update", {})
                return said
        finally:
            async with connected() as routes:  # after an error vLLM closes the connection
                await routes.post("/resume")

    return asyncio.run(main())


def sampled(engine: RealEngine) -> list[float]:
    return logprobs(run(engine.endpoint(), lambda endpoint: endpoint.generate(request())))


def serves_the_oracle(engine: RealEngine) -> bool:
    uniform = {is_uniform(logprob, VOCAB_SIZE) for logprob in sampled(engine)}
    assert len(uniform) == 1, "a mixture of both"
    return uniform.pop()


def test_a_safetensors_file_is_loaded_and_one_that_was_damaged_is_not(vllm: RealEngine, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file(muted(vllm.tensors), file)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    before = sampled(vllm)
    (said,) = update(vllm, muted(vllm.tensors), source="safetensors", path=str(file), sha256="0" * 64)
    assert said["phase"] == "failed"
    assert f"its sha256 is {sha256}" in said["problem"]
    assert sampled(vllm) == pytest.approx(before, abs=1e-5)
    (said,) = update(vllm, muted(vllm.tensors), source="safetensors", path=str(file), sha256=sha256)
    assert (said["phase"], said["num_staged"]) == ("done", 1)
    assert serves_the_oracle(vllm)
    save_file(dict(vllm.tensors), file)
    update(vllm, vllm.tensors, source="safetensors", path=str(file))
    assert sampled(vllm) == pytest.approx(before, abs=1e-5)


def test_a_file_lacking_a_tensor_or_with_another_shape_changes_nothing(vllm: RealEngine, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    for change, says in (({}, "has no tensor model.norm.weight"), ({"model.norm.weight": torch.ones(3)}, "(3,)")):
        tensors = {name: tensor for name, tensor in vllm.tensors.items() if name != "model.norm.weight"}
        save_file({**tensors, **change}, file)
        (said,) = update(vllm, vllm.tensors, source="safetensors", path=str(file))
        assert said["phase"] == "failed"
        assert says in said["problem"]
    assert not serves_the_oracle(vllm)


def test_shared_memory_is_loaded_and_too_little_of_it_is_not(vllm: RealEngine) -> None:
    before = sampled(vllm)
    content = b"".join(tensor.contiguous().numpy().tobytes() for tensor in muted(vllm.tensors).values())
    file = Path("/dev/shm") / f"inflight-test-{hashlib.sha256(content).hexdigest()[:16]}"
    try:
        file.write_bytes(content[:-1])
        (said,) = update(vllm, vllm.tensors, source="shared_memory", path=str(file))
        assert said["phase"] == "failed"
        assert f"holds {len(content) - 1} bytes, the bucket has {len(content)}" in said["problem"]
        assert sampled(vllm) == pytest.approx(before, abs=1e-5)
        file.write_bytes(content)
        update(vllm, vllm.tensors, source="shared_memory", path=str(file))
        assert serves_the_oracle(vllm)
    finally:
        file.unlink(missing_ok=True)
    with vllm.publisher() as publisher:
        publish(publisher, vllm.tensors, 1)
    assert sampled(vllm) == pytest.approx(before, abs=1e-5)


def test_after_a_load_that_failed_half_way_a_complete_update_leaves_exact_weights(
    vllm: RealEngine, tmp_path: Path
) -> None:
    """vLLM's own reload would keep the half that was loaded; the plug-in says that it is dirty and flushes it first."""
    before = sampled(vllm)
    half = {**muted(vllm.tensors), "model.layers.1.mlp.up_proj.weight": torch.zeros(3, 5)}
    file = tmp_path / "weights.safetensors"
    save_file(half, file)
    with pytest.raises(ProtocolError, match="finish_weight_update"):
        update(vllm, half, source="safetensors", path=str(file))
    with vllm.publisher() as publisher:
        publish(publisher, vllm.tensors, 1)
    assert sampled(vllm) == pytest.approx(before, abs=1e-5)
