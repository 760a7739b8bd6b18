"""Teaches a model the format of tinker-cookbook's guess_number, so that its recipe has something to reward.

    INFLIGHT_TOKEN=secret inflight tinker models/smollm2 --name smollm2 --dtype bfloat16 --directory runs/warmup
    TINKER_BASE_URL=http://127.0.0.1:8080 TINKER_API_KEY=tml-secret \
      CLIENT/bin/python benchmarks/tinker_warmup.py smollm2 models/smollm2

Trains on turns of the game whose guesses are random numbers, by cross entropy, and saves the model. It prints the
checkpoint, whose directory is a model for ``inflight tinker``. Only the format is taught: guesses ignore the answers.
"""

import argparse
import asyncio
import random
from typing import Any

import tinker
from tinker import types
from tinker_cookbook.recipes.multiplayer_rl.guess_number.env import GuessNumberEnv
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

MOST_TURNS = 8


async def make_datum(renderer: Any, tokenizer: Any) -> types.Datum:
    """Return a turn of a game: what the player sees, and a random guess in the right format."""
    env = GuessNumberEnv(random.randint(0, 1024), renderer)
    for _ in range(random.randrange(MOST_TURNS)):
        await env.step(tokenizer.encode(f"Guess: {random.randint(0, 1024)}<|im_end|>", add_special_tokens=False))
    observation, _ = await env.initial_observation()
    prompt = observation.to_ints()
    guess = tokenizer.encode(f"Guess: {random.randint(0, 1024)}<|im_end|>", add_special_tokens=False)
    token_ids = prompt + guess
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(guess)
    inputs = {
        "target_tokens": types.TensorData(data=token_ids[1:], dtype="int64", shape=[len(token_ids) - 1]),
        "weights": types.TensorData(data=weights, dtype="float32", shape=[len(weights)]),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(token_ids[:-1]), loss_fn_inputs=inputs)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="name of the base model, as the server has it")
    parser.add_argument("tokenizer", help="directory of its tokenizer")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--data", type=int, default=16, help="turns of a step")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    options = parser.parse_args()
    random.seed(0)
    tokenizer = get_tokenizer(options.tokenizer)
    renderer = get_renderer("qwen3_instruct", tokenizer)
    service = tinker.ServiceClient()
    training = await service.create_lora_training_client(options.model, rank=32, seed=0)
    for step in range(options.steps):
        data = [await make_datum(renderer, tokenizer) for _ in range(options.data)]
        settings = types.AdamParams(learning_rate=options.learning_rate, beta1=0.9, beta2=0.95)
        computing = training.forward_backward(data, "cross_entropy")
        stepping = training.optim_step(settings)
        loss = (await computing).metrics["loss:sum"] / options.data
        await stepping
        print(f"step {step}: {loss:.3f} nats for each guess", flush=True)
    print((await training.save_state("format")).path)


asyncio.run(main())
