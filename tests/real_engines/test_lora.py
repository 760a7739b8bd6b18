"""A LoRA that the FSDP2 worker trains, on vLLM and SGLang: served logprobs are transformers' and the worker's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from inflight.types import MicroBatch
from inflight.weights.send.publisher import publish_weights
from inflight.wire import GenerateResponse
from inflight_fsdp import FsdpLoraWorker, create_worker
from tests.real_engines.oracle import PROMPT, transformers_logprobs
from tests.real_engines.servers import RealEngine, logprobs, publish, request, run
from tests.worker.worker_cases import accumulate, make_batch

TOLERANCE = 2e-3
"""Of logprobs in float32, whose logits are some tens: an engine's kernels sum in another order than transformers'."""
LORA = {"rank": 4, "alpha": 8, "targets": "all-linear"}


@pytest.fixture
def worker(engine: RealEngine) -> Iterator[FsdpLoraWorker]:
    made = create_worker({"model_path": str(engine.model), "device": "cpu", "learning_rate": 3e-2, "lora": LORA})
    assert isinstance(made, FsdpLoraWorker)
    yield made
    made.close()


def packed(response: GenerateResponse) -> MicroBatch:
    """The prompt and the first completion as a micro-batch whose targets are what was sampled."""
    tokens = [*PROMPT, *response.completions[0].token_ids]
    positions_T = torch.arange(len(tokens))
    mask_T = positions_T >= len(PROMPT)
    return MicroBatch(
        token_ids_T=torch.tensor(tokens),
        position_ids_T=positions_T,
        segment_ids_T=torch.zeros_like(positions_T),
        segment_lengths=(len(tokens),),
        loss_mask_T=mask_T,
        behaviour_logprobs_T=torch.zeros(len(tokens)),
        advantages_T=torch.ones(len(tokens)),
        temperature_T=torch.ones(len(tokens)),
        versions_T=torch.where(mask_T, 0, -1),
    )


@pytest.mark.parametrize("is_merged", [False, True], ids=["lora", "merged"])
def test_what_two_steps_trained_is_served_after_each(
    engine: RealEngine, worker: FsdpLoraWorker, is_merged: bool, tmp_path: Path
) -> None:
    """As a LoRA that the engine's side merges, and as the weights under it where no LoRA is declared."""
    with engine.publisher() as publisher:
        publish(publisher, engine.tensors, 0, keep_base=True)
        declared = {e: can.model_copy(update={"lora": not is_merged}) for e, can in publisher.endpoints.items()}
        before: list[float] = []
        for version in (1, 2):
            accumulate(worker, [make_batch((30, 20), seed=version)])
            worker.step()
            report = publish_weights(worker, publisher, endpoints=declared, deadline_s=30.0)
            assert report.applied_everywhere
            size_bytes = sum(tensor.nbytes for tensor in engine.tensors.values())
            assert is_merged or report.sent_bytes < size_bytes / 4
            response = run(engine.endpoint(), lambda endpoint: endpoint.generate(request(16)))
            assert {span.version for span in response.completions[0].version_spans} == {version}
            worker.save(tmp_path / "saved")
            merged = load_file(tmp_path / "saved" / "model.safetensors")
            found = logprobs(response)
            assert found == pytest.approx(transformers_logprobs(engine.model, merged, response), abs=TOLERANCE)
            batch = packed(response)
            with torch.no_grad():
                trained_T = worker.forward(batch)
            assert found == pytest.approx(trained_T[batch.loss_mask_T].tolist(), abs=TOLERANCE)
            old = transformers_logprobs(engine.model, engine.tensors, response)
            assert max(abs(one - other) for one, other in zip(found, old, strict=True)) > 100 * TOLERANCE
            assert found != before
            before = found
        publish(publisher, engine.tensors, 3, keep_base=True)
