"""What Tinker's API costs: a loop of sample, forward_backward, optim_step and in-flight save, with the SDK against
``inflight tinker`` and in Python on the parts that this server consists of.

    inflight pretrained-model models/smollm2
    make .tinker/.installed
    python -m benchmarks.tinker_overhead --client .tinker/bin/python models/smollm2

Both have one server process and one trainer rank, sample with the same seeds and train on the same data. They take
turns; the first step of a loop is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from benchmarks.results import write_results

from inflight.commands.tinker import add_arguments, config_of, open_directory
from inflight.dialects.tinker.backend import TrainingWeights
from inflight.dialects.tinker.data import TARGETS, Datum
from inflight.http.client import HttpEndpoint
from inflight.launchers import load_launcher
from inflight.model.shapes import model_shape
from inflight.run.hosting.backend import HostedBackend
from inflight.run.preflight import read_model
from inflight.types import AdamSettings
from inflight.wire import GenerateRequest, SamplingParams

LOOP = Path(__file__).with_name("tinker_loop.py")
SIZES = {
    "rank": 8, "steps": 6, "groups": 4, "completions": 4, "prompt": 32, "max_tokens": 32, "data": 8, "tokens": 64,
}  # fmt: skip


async def direct_loop(model: Path, directory: Path) -> list[float]:
    """Run the loop on ranks and servers; return the seconds of each step."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args([str(model), "--directory", str(directory)])
    config, token, seconds = config_of(arguments), secrets.token_urlsafe(16), []
    with contextlib.ExitStack() as stack:
        run_directory = open_directory(arguments.directory, stack)
        launcher = load_launcher(config.run.launcher, config.run.launcher_options)
        stack.callback(launcher.close)
        backend = HostedBackend(
            config,
            run_directory,
            launcher,
            token,
            name="model",
            max_models=1,
            vocab_size=read_model(model).vocab_size,
            connect=lambda url: HttpEndpoint(url, token=token),
            note=print,
        )
        async with backend.running():
            training = await backend.create("model", SIZES["rank"], 1)
            await training.publish()
            token_ids = tuple(range(100, 101 + SIZES["tokens"]))
            inputs = {TARGETS: np.array(token_ids[1:]), "weights": np.ones(SIZES["tokens"], np.float32)}
            data = [Datum(token_ids[:-1], inputs)] * SIZES["data"]
            for step in range(SIZES["steps"]):
                began = time.monotonic()
                async with backend.sampling_from(TrainingWeights("model")) as endpoint:
                    requests = [
                        GenerateRequest(
                            request_id=f"{step}-{i}",
                            prompt_token_ids=token_ids[: SIZES["prompt"]],
                            sampling=SamplingParams(
                                n=SIZES["completions"], max_tokens=SIZES["max_tokens"], seed=step * 1000 + i
                            ),
                        )
                        for i in range(SIZES["groups"])
                    ]
                    await asyncio.gather(*map(endpoint.generate, requests))
                await training.forward_backward(data, "cross_entropy", {}, forward_only=False)
                await training.step(AdamSettings(learning_rate=1e-6, betas=(0.9, 0.95), eps=1e-12))
                await training.publish()
                seconds.append(time.monotonic() - began)
    return seconds


def sdk_loop(model: Path, directory: Path, client: Path) -> list[float]:
    """Run the loop with the SDK against a server; return the seconds of each step."""
    ready = directory / "ready.json"
    command = [sys.executable, "-m", "inflight", "tinker", str(model), "--name", "model", "--port", "0"]
    command += ["--directory", str(directory), "--ready-file", str(ready), "--exit-with-stdin"]
    environment = {**os.environ, "INFLIGHT_TOKEN": "benchmark", "TINKER_TELEMETRY": "0"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as server:
        while not ready.exists():
            if server.poll() is not None:
                raise SystemExit("the server did not start")
            time.sleep(0.1)
        environment |= {"TINKER_BASE_URL": json.loads(ready.read_text())["url"], "TINKER_API_KEY": "tml-benchmark"}
        answer = subprocess.run(
            [client, str(LOOP), "model", json.dumps(SIZES)], env=environment, check=True, stdout=subprocess.PIPE
        )
        assert server.stdin is not None
        server.stdin.close()
    seconds: list[float] = json.loads(answer.stdout)
    return seconds


def main() -> None:
    """Measure both in turns, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--client", type=Path, required=True, help="interpreter with the SDK")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    rows = []
    for model in arguments.models:
        rounds = []
        for _ in range(arguments.rounds):
            with tempfile.TemporaryDirectory() as directory:
                direct = asyncio.run(direct_loop(model.absolute(), Path(directory) / "direct"))
                (Path(directory) / "sdk").mkdir()
                sdk = sdk_loop(model.absolute(), Path(directory) / "sdk", arguments.client.absolute())
            rounds.append({"direct_s": statistics.median(direct[1:]), "sdk_s": statistics.median(sdk[1:])})
            print(model.name, rounds[-1], flush=True)
        ratios = [it["sdk_s"] / it["direct_s"] for it in rounds]
        rows.append(
            {
                "num_parameters": model_shape(model).num_elements,
                "sizes": SIZES,
                "rounds": rounds,
                "ratio": [statistics.median(ratios), min(ratios), max(ratios)],
            }
        )
        print(f"{model.name}: SDK over direct {statistics.median(ratios):.3f}", flush=True)
    write_results("tinker_overhead", rows)


if __name__ == "__main__":
    main()
