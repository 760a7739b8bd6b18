"""The loop of `benchmarks.tinker_overhead` with Tinker's SDK; prints the seconds of each step as JSON.

Runs in an environment with the SDK, without inflight: ``python tinker_loop.py MODEL JSON_OF_SIZES``.
"""

import asyncio
import json
import sys
import time

import tinker
from tinker import types


async def loop(model: str, sizes: dict[str, int]) -> list[float]:
    service = tinker.ServiceClient()
    training = await service.create_lora_training_client(model, rank=sizes["rank"], seed=1)
    sampler = await training.save_weights_and_get_sampling_client(kind="inflight")
    token_ids = list(range(100, 101 + sizes["tokens"]))
    inputs = {
        "target_tokens": types.TensorData(data=token_ids[1:], dtype="int64", shape=[sizes["tokens"]]),
        "weights": types.TensorData(data=[1.0] * sizes["tokens"], dtype="float32", shape=[sizes["tokens"]]),
    }
    data = [types.Datum(model_input=types.ModelInput.from_ints(token_ids[:-1]), loss_fn_inputs=inputs)]
    data *= sizes["data"]
    seconds = []
    for step in range(sizes["steps"]):
        began = time.monotonic()
        samples = [
            sampler.sample(
                types.ModelInput.from_ints(token_ids[: sizes["prompt"]]),
                sizes["completions"],
                types.SamplingParams(max_tokens=sizes["max_tokens"], temperature=1.0, seed=step * 1000 + i),
            )
            for i in range(sizes["groups"])
        ]
        await asyncio.gather(*samples)
        forward, stepped = (
            training.forward_backward(data, "cross_entropy"),
            training.optim_step(types.AdamParams(learning_rate=1e-6)),
        )
        await asyncio.gather(forward, stepped)
        sampler = await training.save_weights_and_get_sampling_client(kind="inflight")
        seconds.append(time.monotonic() - began)
    await service.close("success")
    return seconds


if __name__ == "__main__":
    print(json.dumps(asyncio.run(loop(sys.argv[1], json.loads(sys.argv[2])))))
