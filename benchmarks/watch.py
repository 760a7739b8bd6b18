"""How fast `inflight watch` opens a long run: until its page draws all steps, and until all events are read.

    python benchmarks/watch.py

The run is made on the spot, from the shape of a real one: 100,000 steps, and as many events as their files keep.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from inflight.trace import events
from inflight.trace.files import NUM_PARTS, PART_BYTES
from inflight.watch import views
from inflight.watch.command import collect_rarely
from inflight.watch.model import RunModel
from inflight.watch.report import write_report

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
METRICS = [f"metric_{number}" for number in range(30)]


def make_run(directory: Path, num_steps: int, num_parts: int, seed: int = 0) -> None:
    """Write a run of one server, whose last events fill a number of files."""
    draw = random.Random(seed)
    directory.mkdir(parents=True)
    with (directory / "metrics.jsonl").open("w") as file:
        for version in range(1, num_steps + 1):
            step = events.Step.model_validate(
                {
                    "start_s": version * 1.5,
                    "end_s": version * 1.5,
                    "time_s": version * 1.5,
                    "version": version,
                    "reward": draw.random(),
                    "lag_mean": draw.random() * 3,
                    "lag_max": 4,
                    "completions_by_age": {"1": 30, "2": 30, "3": 4},
                    "utilisation": draw.random(),
                    "publish": {"gather_s": draw.random(), "wire_s": draw.random(), "total_s": 1.0, "outcomes": {}},
                    "ledger": {"trained": 8 * version, "dropped": {}, "requeued": 0, "outstanding": 16},
                    **{name: draw.gauss(0, 1) for name in METRICS},
                }
            )
            file.write(step.model_dump_json() + "\n")
    first = version = max(0, num_steps - num_parts * 2600)
    for part in range(1, num_parts + 1):
        path = directory / ("events.jsonl" if part == num_parts else f"events.{part}.jsonl")
        with path.open("w") as file:
            began = events.Began(
                start_s=version * 1.5, end_s=version * 1.5, began_at=1.7e9, version=version, inflight="0", config={}
            )
            file.write(began.model_dump_json() + "\n")
            while file.tell() < PART_BYTES and version < num_steps:
                version += 1
                file.writelines(line + "\n" for line in _step_events(draw, version, first))


def _step_events(draw: random.Random, version: int, first: int) -> list[str]:
    end_s, endpoint = version * 1.5, "http://127.0.0.1:8000"
    items = range(8 * (version - first), 8 * (version - first) + 8)
    found: list[events.Event] = []
    for item in items:
        parts = tuple(
            events.SampledPart(
                number=number,
                num_tokens=400,
                spans=((0, 100, max(0, version - 3)), (100, 250, max(0, version - 2)), (250, 400, version - 1)),
                finish_reason="stop",
            )
            for number in range(8)
        )
        start_s = end_s - 3 - draw.random()
        request = events.Request(
            start_s=start_s,
            end_s=end_s - 0.3,
            endpoint=endpoint,
            item=item,
            request_id=f"item-{item}",
            numbers=tuple(range(8)),
            parts=parts,
        )
        rewards = tuple(float(draw.random() < 0.5) for _ in range(8))
        group = events.Group(
            start_s=end_s - 0.3,
            end_s=end_s - 0.3,
            endpoint=endpoint,
            item=item,
            oldest=version - 3,
            newest=version - 1,
            rewards=rewards,
            lengths=(400,) * 8,
        )
        found += [request, group]
    span = (end_s - 0.25, end_s - 0.05)
    found.append(events.Train(start_s=span[0], end_s=span[1], version=version, ranks=(span,), items=tuple(items)))
    return [event.model_dump_json() for event in found]


def measure_page(directory: Path, num_steps: int) -> dict[str, float]:
    """Return the seconds from the start of ``inflight watch`` until a browser has drawn the last step, and the rest."""
    from playwright.sync_api import sync_playwright

    chromium = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    if chromium is None:
        sys.exit("no chromium was found: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        command = [sys.executable, "-m", "inflight", "watch", str(directory), "--port", "0", "--exit-with-stdin"]
        began = time.perf_counter()
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert server.stdin is not None and server.stdout is not None
        url = server.stdout.readline().split()[-1]
        served = time.perf_counter()
        page.goto(url)
        page.locator(".fact dd", has_text=f"{num_steps:,}").first.wait_for(timeout=120_000)
        drawn = time.perf_counter()
        page.locator("#status", has_text="running").wait_for(timeout=120_000)
        read = time.perf_counter()
        reload = time.perf_counter()
        page.reload()
        page.wait_for_selector("html[data-ready]")
        reloaded = time.perf_counter() - reload
        browser.close()
        server.stdin.close()
        server.wait(10)
    return {
        "start_s": served - began,
        "all_steps_drawn_s": drawn - served,
        "all_events_read_s": read - served,
        "opened_again_s": reloaded,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--parts", type=int, default=NUM_PARTS)
    parser.add_argument("--no-browser", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "long"
        make_run(directory, arguments.steps, arguments.parts)
        size = sum(path.stat().st_size for path in directory.iterdir())
        found = {"num_steps": arguments.steps, "size_mb": round(size / 1e6)}
        found |= measure_fold(directory)
        if not arguments.no_browser:
            found |= measure_page(directory, arguments.steps)
        print(json.dumps({key: round(value, 3) for key, value in found.items()}, indent=2))


def measure_fold(directory: Path) -> dict[str, float]:
    """Return what it takes to fold the files, to answer the page's questions, and to write the report."""
    from inflight.trace.files import EventFollower

    collect_rarely()
    run, follower = RunModel(directory), EventFollower(directory)
    began = time.perf_counter()
    run.fold(follower.read_steps())
    steps = time.perf_counter()
    run.fold(follower.read())
    folded = time.perf_counter()
    views.overview(run, ["reward", "lag_mean", "time_s", *METRICS[:20]])
    overview = time.perf_counter()
    views.timeline(run, 0.0, run.end_s, 1200)
    timeline = time.perf_counter()
    write_report([directory], directory / "report.html")
    return {
        "fold_steps_s": steps - began,
        "fold_events_s": folded - steps,
        "overview_s": overview - folded,
        "timeline_s": timeline - overview,
        "report_s": time.perf_counter() - timeline,
        "report_mb": (directory / "report.html").stat().st_size / 1e6,
    }


if __name__ == "__main__":
    main()
