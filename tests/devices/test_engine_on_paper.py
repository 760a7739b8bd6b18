"""The embedded engine's steps with model, keys and values on a GPU on paper: the tokens are those of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.engines.embedded.engine import Engine
from inflight.engines.embedded.sampler import sample
from inflight.engines.embedded.slot_attention import ATTENTION_NAME, describe_decode_kernel, register_slot_attention
from inflight.model.checkpoints import load_causal_lm
from inflight.wire import Completion, GenerateRequest, SamplingParams
from tests.devices.gpu_on_paper import CUDA, move_parameters, on_cuda, paper_gpu
from tests.engine.reference import TOLERANCE, make_request, random_prompt
from tests.models import make_model

SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
    {"temperature": 1.3, "min_p": 0.05, "n": 2},
    {},
]


def requests() -> list[GenerateRequest]:
    """Prompts of different lengths; completions that outgrow the smallest slots."""
    lengths = [(5, 6), (62, 5), (1, 4), (30, 7)]
    return [
        make_request(f"r{i}", random_prompt(prompt, i), max_tokens=tokens, ignore_eos=True, seed=i, **SAMPLINGS[i])
        for i, (prompt, tokens) in enumerate(lengths)
    ]


def model_of(path: Path) -> Any:
    register_slot_attention()
    return load_causal_lm(path, attention=ATTENTION_NAME, dtype=None, device=torch.device("cpu"))


@torch.no_grad()
def completions_of(model: Any) -> dict[str, list[Completion]]:
    """What an engine of this model generates."""
    return generated(Engine(model, max_model_len=256, max_concurrent=4))


def generated(engine: Engine) -> dict[str, list[Completion]]:
    """What an engine generates, step by step in this thread: its own would not be on paper."""
    finished: dict[str, list[Completion]] = {}

    def fail(error: Exception) -> None:
        raise error

    for request in requests():
        engine.submit(request, lambda found, name=request.request_id: finished.update({name: found}), fail)
    while engine._commands:
        engine._commands.popleft()()
    while engine._has_work():
        engine.steps.step()
    return finished


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True, tokenizer=False)


def test_the_engine_generates_the_tokens_of_the_cpu_on_a_gpu_on_paper(path):
    expected = completions_of(model_of(path))
    model = model_of(path)
    with paper_gpu() as gpu:
        found = completions_of(move_parameters(model))
    assert found.keys() == expected.keys()
    for name, completions in expected.items():
        for left, right in zip(found[name], completions, strict=True):
            assert left.token_ids == right.token_ids
            assert left.logprobs == pytest.approx(right.logprobs, abs=TOLERANCE)
    # A step waits for the device only to read tokens and logprobs, number by number on paper and in one transfer on a
    # GPU; nothing asks for indices.
    assert set(gpu.waits) == {"_local_scalar_dense"}, gpu.waits


@torch.no_grad()
def test_the_engine_leaves_nothing_on_a_gpu_on_paper_while_its_memory_is_released(path):
    expected = completions_of(model_of(path))
    model = model_of(path)
    with paper_gpu():
        engine = Engine(move_parameters(model), max_model_len=256, max_concurrent=4)
        first = generated(engine)
        engine.free_memory()
        held = [*engine.weights.by_name.values()]
        held += [tensor for arena in engine.scheduler.store.arenas for tensor in (arena.keys_LSKCD, arena.values_LSKCD)]
        assert {tensor.device.type for tensor in held if tensor.numel()} == {"cpu"}
        engine.take_memory()
        assert {parameter.device for parameter in engine.weights.by_name.values()} == {CUDA}
        again = generated(engine)
    assert first == again
    assert {name: [it.token_ids for it in found] for name, found in again.items()} == {
        name: [it.token_ids for it in found] for name, found in expected.items()
    }


def test_drawing_reads_tokens_and_logprobs_in_one_transfer_whatever_the_filters():
    logits_BV = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 3
    params = [SamplingParams.model_validate(sampling) for sampling in SAMPLINGS]
    uniforms = [0.1, 0.5, 0.9, 0.99]
    expected = sample(logits_BV, params, uniforms)
    with paper_gpu() as gpu:
        there_BV = on_cuda(logits_BV)
        found = sample(there_BV, params, uniforms)
        assert found[0] == expected[0]
        assert found[1] == pytest.approx(expected[1], abs=1e-6)  # float32
        assert gpu.waits == {"_local_scalar_dense": 2 * len(params)}, gpu.waits


def test_the_server_s_words_name_a_kernel_of_torch(path):
    config = model_of(path).config
    assert "kernel" in describe_decode_kernel(config, torch.float32, torch.device("cpu"))
    with paper_gpu():
        assert "kernel" in describe_decode_kernel(config, torch.bfloat16, CUDA)
