"""Updates that leave tensors out and LoRAs, on vLLM itself: exactly the mixture is served, or nothing changes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from inflight.errors import PublishError
from inflight.types import EndpointOutcome
from inflight.weights.send.publisher import WeightPublisher
from inflight.weights.transports.process_group import ProcessGroupSender
from inflight.wire import GenerateResponse, LoraSpec
from inflight_vllm import VllmEndpoint
from tests.real_engines.oracle import transformers_logprobs
from tests.real_engines.servers import RealEngine, logprobs, publish, publish_worker, request, run, running
from tests.weights.lora import lora_of, merged_with
from tests.weights.workers import LORA, LoraWorker, PartialWorker, scaled

SPEC = LORA
RSLORA = LoraSpec(rank=4, alpha=2.0, rslora=True)

TOLERANCE = 2e-3
"""Of logprobs in float32, whose logits are some tens: vLLM's kernels sum in another order than transformers'."""


@pytest.fixture(scope="module", params=[True], ids=["tied"])
def vllm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    from inflight.conformance.models import make_tiny_model

    model = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", tied=request.param, max_model_len=1024)
    with running("vllm", model) as engine:
        yield engine


def sample(engine: RealEngine) -> GenerateResponse:
    return run(engine.endpoint(), lambda endpoint: endpoint.generate(request(16)))


def assert_serves(engine: RealEngine, tensors: Mapping[str, torch.Tensor]) -> None:
    response = sample(engine)
    expected = transformers_logprobs(engine.model, tensors, response)
    assert logprobs(response) == pytest.approx(expected, abs=TOLERANCE)


def part(tensors: Mapping[str, torch.Tensor], *words: str, factor: float = 0.7) -> dict[str, torch.Tensor]:
    return scaled({name: t for name, t in tensors.items() if any(word in name for word in words)}, factor)


def test_a_partial_update_serves_exactly_the_mixture_with_the_checkpoint(vllm: RealEngine) -> None:
    """Halves of fused layers first: vLLM would fill what is not sent with whatever memory held."""
    whole = dict(vllm.tensors)
    assert_serves(vllm, whole)
    with vllm.publisher() as publisher:
        for version, words in enumerate((("layers.1.self_attn.q_proj",), ("gate_proj", "norm"), ("embed_tokens",)), 1):
            sent = part(vllm.tensors, *words, factor=1 - 0.1 * version)
            report = publish_worker(publisher, PartialWorker(sent, version, vllm.tensors))
            assert report.sent_bytes == sum(tensor.nbytes for tensor in sent.values())
            whole |= sent
            assert_serves(vllm, whole)


def test_a_fused_layer_whose_other_half_was_not_kept_is_refused_before_anything_changes(vllm: RealEngine) -> None:
    new = scaled(vllm.tensors, 0.9)
    half = part(new, "layers.0.mlp.up_proj")
    with vllm.publisher() as publisher:
        publish(publisher, new, 1)
        with pytest.raises(PublishError, match=r"keep_base=True: .* 1 tensors .*layers\.0\.mlp\.gate_proj") as raised:
            publish_worker(publisher, PartialWorker(half, 2, vllm.tensors))
        assert [e.outcome for e in raised.value.report.endpoints] == [EndpointOutcome.REFUSED]
        assert_serves(vllm, new)
        whole_layers = part(new, "layers.0.mlp.gate_proj", "layers.0.mlp.up_proj", "down_proj")
        publish_worker(publisher, PartialWorker(whole_layers, 3, vllm.tensors))
        assert_serves(vllm, {**new, **whole_layers})
        publish(publisher, new, 4, keep_base=True)
        publish_worker(publisher, PartialWorker(half, 5, vllm.tensors))
        assert_serves(vllm, {**new, **half})
        publish(publisher, vllm.tensors, 6, keep_base=True)


def test_unknown_names_are_refused_and_the_old_weights_serve_on(vllm: RealEngine) -> None:
    with vllm.publisher() as publisher:
        publish(publisher, vllm.tensors, 1, keep_base=True)
        for sent, known in (
            ({"model.extra.weight": torch.ones(3)}, vllm.tensors),
            (part(vllm.tensors, "down_proj"), {**vllm.tensors, "model.extra.weight": torch.ones(3)}),
        ):
            with pytest.raises(PublishError, match=r"model\.extra\.weight") as raised:
                publish_worker(publisher, PartialWorker(sent, 2, known))
            assert [e.outcome for e in raised.value.report.endpoints] == [EndpointOutcome.REFUSED]
        assert_serves(vllm, vllm.tensors)


def test_weights_that_were_torn_need_a_complete_update_first(vllm: RealEngine, tmp_path: Path) -> None:
    """A client with another checkpoint lets a tensor pass that vLLM fails at, half-way through its load."""
    wrong = {**scaled(vllm.tensors, 0.8), "model.layers.1.mlp.up_proj.weight": torch.ones(3, 5)}
    shutil.copy(vllm.model / "config.json", tmp_path)
    save_file(wrong, tmp_path / "model.safetensors")
    with vllm.publisher() as publisher:
        publish(publisher, vllm.tensors, 1, keep_base=True)
    misled = VllmEndpoint(vllm.process.url, model_dir=tmp_path)
    with WeightPublisher([misled], ProcessGroupSender(), run_id="misled") as publisher:
        with pytest.raises(PublishError, match="applying version 1 failed") as raised:
            publish(publisher, wrong, 1)
        assert [e.outcome for e in raised.value.report.endpoints] == [EndpointOutcome.POISONED]
    half = part(vllm.tensors, "layers.0.mlp.up_proj")
    lora = lora_of(vllm.tensors, ["q_proj"], 4, seed=1)
    with vllm.publisher() as publisher:
        for worker in (PartialWorker(half, 1, vllm.tensors), LoraWorker(lora, 1, SPEC)):
            with pytest.raises(PublishError, match="weights are torn") as raised:
                publish_worker(publisher, worker)
            assert [e.outcome for e in raised.value.report.endpoints] == [EndpointOutcome.POISONED]
        publish(publisher, vllm.tensors, 2, keep_base=True)
        publish_worker(publisher, PartialWorker(half, 3, vllm.tensors))
        assert_serves(vllm, {**vllm.tensors, **half})
        publish(publisher, vllm.tensors, 4, keep_base=True)


def test_a_lora_is_merged_replaced_by_the_next_and_follows_a_full_update(vllm: RealEngine) -> None:
    """Half of each fused layer is adapted; the first base is the checkpoint, the second what a full update brought."""
    base = vllm.tensors
    first = lora_of(base, ["q_proj", "up_proj", "down_proj"], 4, seed=1)
    second = lora_of(base, ["k_proj", "up_proj"], 4, seed=2)
    with vllm.publisher() as publisher:
        report = publish_worker(publisher, LoraWorker(first, 1, SPEC))
        assert report.sent_bytes == sum(t.nbytes for t in first.values()) < sum(t.nbytes for t in base.values()) / 3
        assert_serves(vllm, merged_with(base, first, SPEC))
        publish_worker(publisher, LoraWorker(second, 2, RSLORA))
        assert_serves(vllm, merged_with(base, second, RSLORA))
        publish_worker(publisher, LoraWorker(scaled(second, 0.5), 3, RSLORA))
        assert_serves(vllm, merged_with(base, scaled(second, 0.5), RSLORA))
        new = scaled(base, 0.9)
        publish(publisher, new, 4, keep_base=True)
        assert_serves(vllm, new)
        publish_worker(publisher, LoraWorker(first, 5, SPEC))
        assert_serves(vllm, merged_with(new, first, SPEC))
        sent = part(base, "norm", "k_proj")
        publish_worker(publisher, PartialWorker(sent, 6, base))
        assert_serves(vllm, {**new, **sent})
        publish(publisher, base, 7, keep_base=True)


def test_a_lora_of_weights_that_were_not_kept_is_refused_before_anything_changes(vllm: RealEngine) -> None:
    new = scaled(vllm.tensors, 0.9)
    lora = lora_of(new, ["q_proj"], 4, seed=1)
    with vllm.publisher() as publisher:
        publish(publisher, new, 1)
        with pytest.raises(PublishError, match=r"keep_base=True: .* 6 tensors .*self_attn\.q_proj") as raised:
            publish_worker(publisher, LoraWorker(lora, 2, SPEC))
        (report,) = raised.value.report.endpoints
        assert (report.outcome, report.serves) == (EndpointOutcome.REFUSED, 1)
        assert_serves(vllm, new)
        publish(publisher, vllm.tensors, 3, keep_base=True)
        publish_worker(publisher, LoraWorker(lora, 4, SPEC))
        assert_serves(vllm, merged_with(vllm.tensors, lora, SPEC))
        publish(publisher, vllm.tensors, 5, keep_base=True)
