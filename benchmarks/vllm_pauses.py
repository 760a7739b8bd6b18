"""How long an update pauses vLLM, and where that time goes, in two commits, in turns on one machine.

    python benchmarks/vllm_pauses.py REVISION

compares HEAD with another commit. Each is checked out in a directory of its own, and its ``inflight serve`` starts its
own vLLM, in the environment of ``make engines``. Both servers stay up; the requests go to the one whose turn it is. The
tiny model gets its own values again and again, over gloo. `vllm_steps` notes in vLLM when it samples and what it does
in between: a pause lasts from the end of the last step before the load to the beginning of the first one after it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from beside import ROOT, checkouts, spread
from results import write_results

sys.path.insert(0, str(ROOT))

from tests.real_engines.servers import python_of
from tests.weights.workers import PlainWorker

from inflight.http.client import HttpEndpoint
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.wire import GenerateRequest, SamplingParams

TOKEN = "pauses"
NUM_RUNNING = 32
BETWEEN_S = 0.15
Event = tuple[str, float, float]


@contextlib.contextmanager
def served(tree: Path, model: Path, place: Path) -> Iterator[str]:
    """Yield the URL of a checkout's ``inflight serve --engine vllm``, whose engine writes ``place/steps``."""
    plugin = place / "plugin"
    info = plugin / "vllm_steps-0.dist-info"
    info.mkdir(parents=True)
    (plugin / "vllm_steps.py").write_bytes((ROOT / "benchmarks" / "vllm_steps.py").read_bytes())
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-steps\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nvllm_steps = vllm_steps:register\n")
    ready, log = place / "ready.json", place / "log"
    environment = {"PYTHONPATH": f"{tree / 'src'}:{plugin}", "VLLM_STEPS": str(place / "steps")}
    command = [sys.executable, "-m", "inflight", "serve", str(model), "--engine", "vllm", "--python", python_of("vllm")]
    command += ["--dtype", "float32", "--device", "cpu", "--threads", "1", "--port", "0", "--exit-with-stdin"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--ready-file", str(ready)],
            cwd=tree,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**os.environ, **environment, "INFLIGHT_TOKEN": TOKEN},
            start_new_session=True,
        )
    assert process.stdin is not None
    try:
        for _ in range(3000):
            if ready.exists() or process.poll() is not None:
                break
            time.sleep(0.1)
        assert ready.exists(), log.read_text()[-3000:]
        yield json.loads(ready.read_text())["url"]
    finally:
        process.stdin.close()
        process.wait(60)


@contextlib.contextmanager
def sampling(url: str) -> Iterator[None]:
    """Keep requests running on a server during the block."""
    stop, running = threading.Event(), threading.Event()

    async def keep(endpoint: HttpEndpoint, index: int) -> None:
        for number in itertools.count():
            sampling = SamplingParams(max_tokens=200 + 8 * index, ignore_eos=True)
            name = f"{index}-{number}-{time.monotonic_ns()}"
            await endpoint.generate(
                GenerateRequest(request_id=name, prompt_token_ids=tuple(range(2, 18)), sampling=sampling)
            )

    async def main() -> None:
        endpoint = HttpEndpoint(url, token=TOKEN)
        tasks = [asyncio.ensure_future(keep(endpoint, index)) for index in range(NUM_RUNNING)]
        while (await endpoint.weight_version()).num_running < NUM_RUNNING:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        running.set()
        await asyncio.to_thread(stop.wait)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await endpoint.aclose()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert running.wait(120), "the requests did not begin to run"
    try:
        yield
    finally:
        stop.set()
        thread.join(60)


def pauses_of(events: Sequence[Event]) -> list[dict[str, float]]:
    """Return the parts of each pause in seconds: how long a load took, and how long everything else waited for."""
    steps = sorted(event[1:] for event in events if event[0] == "step")
    found = []
    for (_, stopped), (went_on, _) in itertools.pairwise(steps):
        inside = [(name, a, b) for name, a, b in events if name != "step" and b > stopped and a < went_on]
        if not any(name == "load" and stopped <= a and b <= went_on for name, a, b in inside):
            continue
        ends = {name: (max(a, stopped), min(b, went_on)) for name, a, b in inside}
        load, label, resume = ends["load"], ends["label"], ends["resume"]
        parts = {
            "paused": went_on - stopped,
            "load": load[1] - load[0],
            "until the label": label[1] - load[1],
            "until the resume": resume[0] - label[1],
            "until the next step": went_on - resume[0],
        }
        if "pause route" in ends:  # each is a call of its own
            answered = ends["pause route"][1]
            parts |= {
                "answer to the pause": answered - stopped,
                "until the load": load[0] - answered,
            }
        else:
            parts |= {"until the load": load[0] - stopped}
        found.append(parts)
    return found


def events_in(path: Path) -> list[Event]:
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()]


def measure(
    trees: Mapping[str, Path], model: Path, directory: Path, num_rounds: int, num_updates: int
) -> dict[str, Any]:
    """Return the spread of each part of the pauses, and of the endpoint's own figures, for each checkout."""
    tensors = load_file(str(model / "model.safetensors"))
    told: dict[str, dict[str, list[float]]] = {label: {} for label in trees}
    with contextlib.ExitStack() as stack:
        urls = {
            label: stack.enter_context(served(tree, model, directory / f"of-{label}")) for label, tree in trees.items()
        }
        publishers = {
            label: stack.enter_context(WeightPublisher.connect([url], run_id=label, token=TOKEN, transport="gloo"))
            for label, url in urls.items()
        }
        versions = dict.fromkeys(urls, 0)
        for number in range(num_rounds):
            for label in list(urls) if number % 2 == 0 else list(urls)[::-1]:
                with sampling(urls[label]):
                    for _ in range(num_updates):
                        time.sleep(BETWEEN_S)
                        versions[label] += 1
                        report = publish_weights(
                            PlainWorker(tensors, versions[label]), publishers[label], deadline_s=60.0
                        )
                        assert report is not None
                        timings = report.endpoints[0].timings
                        assert timings is not None
                        for name in ("paused_s", "load_s"):
                            told[label].setdefault(f"reported {name}", []).append(getattr(timings, name))
                        told[label].setdefault("total", []).append(report.spans.total_s)
                print(f"round {number + 1} of {num_rounds}: {label}", flush=True)
    rows = {}
    for label in trees:
        pauses = pauses_of(events_in(directory / f"of-{label}" / "steps"))
        parts = {name: [pause[name] for pause in pauses] for name in pauses[0]}
        rows[label] = {name: spread(values) for name, values in (parts | told[label]).items()} | {"num": len(pauses)}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--updates", type=int, default=10, help="updates of each round")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        trees, commits = checkouts(directory, {"before": arguments.revision, "after": "HEAD"})
        model = directory / "model"
        command = [sys.executable, "-m", "inflight", "tiny-model", str(model), "--steps", "1"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        rows = measure(trees, model, directory, arguments.rounds, arguments.updates)
    for name in rows["before"].keys() | rows["after"].keys():
        print(name, rows["before"].get(name), rows["after"].get(name))
    write_results("vllm_pauses", {"commits": commits, "num_running": NUM_RUNNING, "sides": rows})


if __name__ == "__main__":
    main()
