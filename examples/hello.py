"""Weights that change while a completion is sampled, in ten lines.

inflight tiny-model models/tiny
INFLIGHT_TOKEN=secret inflight serve models/tiny
python examples/hello.py
"""

import torch
from transformers import AutoModelForCausalLM

from inflight import GenerateRequest, ModuleWeights, SamplingParams, WeightPublisher, publish_weights

model = AutoModelForCausalLM.from_pretrained("models/tiny").requires_grad_(False)
sampling = SamplingParams(max_tokens=400, ignore_eos=True)
with WeightPublisher.connect(["http://127.0.0.1:8000"], run_id="hello", token="secret") as publisher:
    (endpoint,) = publisher.endpoints
    request = GenerateRequest(request_id="a", prompt_token_ids=tuple(b"Once"), sampling=sampling)
    answer = publisher.start(endpoint.generate, request)  # keeps sampling while weights change
    for version in (1, 2, 3):
        torch._foreach_mul_(list(model.parameters()), 1.01)  # your optimizer's step
        publish_weights(ModuleWeights(model, version=version), publisher)
    print(*answer.result().completions[0].version_spans, sep="\n")
