"""Weights that change while a completion is sampled. The README has the commands that start its server."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from inflight import GenerateRequest, ModuleWeights, SamplingParams, WeightPublisher, publish_weights

model = AutoModelForCausalLM.from_pretrained("models/smollm2").requires_grad_(False)
tokenizer = AutoTokenizer.from_pretrained("models/smollm2")
messages = [{"role": "user", "content": "How do you add 17 and 25? Explain every step."}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
sampling = SamplingParams(max_tokens=200, ignore_eos=True)
request = GenerateRequest(request_id="a", prompt_token_ids=tuple(prompt), sampling=sampling)

with WeightPublisher.connect(["http://127.0.0.1:8000"], run_id="hello", token="secret") as publisher:
    (endpoint,) = publisher.endpoints
    answer = publisher.start(endpoint.generate, request)  # it samples while the weights change
    for version in (1, 2, 3):
        torch._foreach_mul_(list(model.parameters()), 1.001)  # in your loop: optimizer.step()
        report = publish_weights(ModuleWeights(model, version=version), publisher, in_flight="keep")
        print(f"published version {version}; sampling paused for {1000 * report.spans.pause_s:.0f} ms")
    completion = answer.result().completions[0]

for span in completion.version_spans:
    text = tokenizer.decode(completion.token_ids[span.start : span.end])
    print(f"tokens {span.start} to {span.end}, version {span.version}: {text[:50]!r}")
