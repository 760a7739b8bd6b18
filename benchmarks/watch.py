"""How fast `inflight watch` opens a long run: until a browser shows all steps, and until all events are read.

    python benchmarks/watch.py

makes a run of the shape of a real one: 100,000 steps, and as many events as their files keep. It types the command,
opens the address in a browser that runs already, and writes benchmarks/results/watch.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from inflight.commands.shared import collect_garbage_rarely
from inflight.observe.trace import events
from inflight.observe.trace.files import NUM_PARTS, PART_BYTES, STEPS, EventFollower
from inflight.observe.watch import views
from inflight.observe.watch.model import RunModel
from inflight.observe.watch.report import write_report
from results import write_results

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
LIMIT_S = 120
"""How long each thing is waited for."""
SETTLE_S = 1.0
"""How long the browser gets to come to rest before the command is typed."""
METRICS = [f"metric_{number}" for number in range(30)]


def make_run(directory: Path, num_steps: int, num_parts: int, seed: int = 0) -> None:
    """Write a run of one server, whose last events fill a number of files."""
    draw = random.Random(seed)
    directory.mkdir(parents=True)
    with (directory / "metrics.jsonl").open("w") as file:
        for version in range(1, num_steps + 1):
            step = events.StepCompleted.model_validate(
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
            began = events.RunStarted(
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
        request = events.RequestEnded(
            start_s=start_s,
            end_s=end_s - 0.3,
            endpoint=endpoint,
            item=item,
            request_id=f"item-{item}",
            numbers=tuple(range(8)),
            parts=parts,
        )
        rewards = tuple(float(draw.random() < 0.5) for _ in range(8))
        group = events.GroupFinished(
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
    found.append(events.StepTrained(start_s=span[0], end_s=span[1], version=version, ranks=(span,), items=tuple(items)))
    return [event.model_dump_json() for event in found]


@contextlib.contextmanager
def watching(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Run ``inflight watch``."""
    command = [sys.executable, "-m", "inflight", "watch", str(directory), "--port", "0", "--exit-with-stdin"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
            assert process.stdin is not None
            process.stdin.close()
            process.wait(20)
        finally:
            process.kill()


def address_of(process: subprocess.Popen[str]) -> str:
    """Return the address that ``inflight watch`` prints."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], LIMIT_S)[0]:
        sys.exit(f"inflight watch printed no address within {LIMIT_S} s")
    words = process.stdout.readline().split()
    if not words:
        sys.exit(f"inflight watch ended with status {process.wait(20)} and printed no address")
    return words[-1]


def processor_s(process: subprocess.Popen[str]) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_until(page: Any, condition: str, what: str) -> float:
    """Wait until a condition holds in the page and is painted; return the time."""
    from playwright.sync_api import TimeoutError as NotInTime

    try:
        page.wait_for_function(condition, timeout=LIMIT_S * 1000)
    except NotInTime:
        said = page.evaluate("['status', 'facts', 'notice'].map((id) => document.getElementById(id)?.textContent)")
        sys.exit(f"the page did not show {what} within {LIMIT_S} s; it shows {said}")
    page.evaluate("new Promise((painted) => requestAnimationFrame(() => setTimeout(painted)))")
    return time.perf_counter()


def measure_page(browser: Any, directory: Path, num_steps: int) -> dict[str, float]:
    """Type the command, open its address, and wait until all steps are drawn and all events are read."""
    has_steps = f"document.querySelector('.fact dd')?.textContent.startsWith('{num_steps:,} ')"
    has_events = "!document.getElementById('status').textContent.includes('reading')"
    # Playwright evaluates what it waits for, which the page's policy forbids.
    page = browser.new_context(viewport={"width": 1280, "height": 900}, bypass_csp=True).new_page()
    time.sleep(SETTLE_S)
    began = time.perf_counter()
    with watching(directory) as process:
        address = address_of(process)
        served, start_processor_s = time.perf_counter(), processor_s(process)
        page.goto(address, wait_until="commit")
        drawn = wait_until(page, has_steps, f"step {num_steps:,}")
        drawn_processor_s = processor_s(process)
        read = wait_until(page, has_events, "that it has read all events")
        again = time.perf_counter()
        page.reload(wait_until="commit")
        drawn_again = wait_until(page, has_steps, f"step {num_steps:,} after it was opened again")
        page.context.close()
    return {
        "start_s": served - began,
        "start_processor_s": start_processor_s,
        "opened_to_drawn_s": drawn - served,
        "command_to_drawn_s": drawn - began,
        "command_to_drawn_processor_s": drawn_processor_s,
        "command_to_read_s": read - began,
        "opened_again_s": drawn_again - again,
    }


def measure_parts(directory: Path) -> dict[str, float]:
    """Return the processor time of folding the files, of the page's questions, and of the report."""
    collect_garbage_rarely()
    run, follower = RunModel(directory), EventFollower(directory)
    times = [time.process_time()]

    def lap() -> float:
        times.append(time.process_time())
        return times[-1] - times[-2]

    run.fold(follower.read_steps())
    found = {"fold_steps_s": lap()}
    run.fold(follower.read())
    found["fold_events_s"] = lap()
    to_json(views.overview(run, ["reward", "lag_mean", "time_s", *METRICS[:20]]), inf_nan_mode="null")
    found["overview_s"] = lap()
    to_json(views.timeline(run, 0.0, run.end_s, 1200), inf_nan_mode="null")
    found["timeline_s"] = lap()
    follower.close()
    write_report([directory], directory / "report.html")
    found["report_s"] = lap()
    return {**found, "report_mb": (directory / "report.html").stat().st_size / 1e6}


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5, help="how often the page is opened")
    arguments = parser.parse_args()
    chromium = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    if chromium is None:
        sys.exit("no chromium was found: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        directory = Path(folder) / "long"
        say(f"making a run of {arguments.steps:,} steps")
        make_run(directory, arguments.steps, NUM_PARTS)
        sizes = {path.name: path.stat().st_size / 1e6 for path in directory.iterdir()}
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        rounds = []
        for number in range(1, arguments.rounds + 1):
            say(f"round {number} of {arguments.rounds}: opening the page")
            rounds.append(measure_page(browser, directory, arguments.steps))
            say(json.dumps(rounds[-1]))
        browser.close()
        say("folding in this process, and writing the report")
        parts = measure_parts(directory)
        say(json.dumps(parts))
    steps_mb = sizes.pop(STEPS)
    write_results(
        "watch",
        {
            "num_steps": arguments.steps,
            "steps_mb": steps_mb,
            "events_mb": sum(sizes.values()),
            "rounds": rounds,
            "parts": parts,
            "load_average": os.getloadavg()[1],
        },
    )


if __name__ == "__main__":
    main()
