"""Makes the images of docs/watch.md: of a run of the quickstart, and of one that loses a server.

python -m tests.watch.screenshots              # makes the runs first
python -m tests.watch.screenshots RUN LOST     # of runs that exist
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inflight.observe.trace.files import read_steps
from tests.watch.recorded import browser
from tests.watch.test_page import Opened, watched

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
NUM_STEPS = 40
DEADLINE_S = 900.0


def make_run(directory: Path, *overrides: str, beside: Callable[[Path], None] | None = None) -> Path:
    """Run the quickstart; ``beside`` is called while it runs."""
    command = [sys.executable, "-m", "inflight", "train", "examples/quickstart.toml", "--run.directory", str(directory)]
    command += ["--run.num_steps", str(NUM_STEPS), *overrides]
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            if beside is not None:
                beside(directory)
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
    return directory


def kill_a_server(directory: Path) -> None:
    """Kill the first server of a run in the middle."""
    until = time.monotonic() + DEADLINE_S
    while sum(1 for _ in read_steps(directory)) < NUM_STEPS // 3:
        assert time.monotonic() < until, "the run makes no steps"
        time.sleep(0.5)
    ready = str(directory / "logs" / "server-0.json")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if ready in words:
            subprocess.run(["kill", "-KILL", process.name], check=True)
            return
    raise AssertionError(f"no server of {directory} was found")


def section(page: Any, *names: str) -> dict[str, float]:
    """Return where sections of the page are, with a margin."""
    script = """id => {
        const box = document.getElementById(id).getBoundingClientRect();
        return [box.top + scrollY, box.bottom + scrollY];
    }"""
    edges = [page.evaluate(script, name) for name in names]
    width = page.viewport_size["width"]
    return {"x": 0, "y": edges[0][0] - 8, "width": width, "height": edges[-1][1] - edges[0][0] + 16}


def show_all(page: Any) -> None:
    """Make the window as high as the page, so that every part can be cut out of one picture."""
    height = page.evaluate("document.documentElement.scrollHeight")
    page.set_viewport_size({"width": page.viewport_size["width"], "height": height})
    page.wait_for_timeout(600)


def shoot(chromium: Any, address: str, name: str, parts: tuple[str, ...], **options: Any) -> None:
    """Write one image: of some parts of the page, after ``prepare`` was called with it."""
    prepare = options.pop("prepare", None)
    opened = Opened(chromium, address, **options)
    page = opened.page
    page.wait_for_timeout(500)
    if prepare is not None:
        prepare(page)
    page.evaluate("scrollTo(0, 0)")
    show_all(page)
    if prepare is not None:
        page.evaluate("Watch.timeline.draw()")
    page.wait_for_timeout(400)
    page.screenshot(path=IMAGES / f"watch-{name}.png", clip=section(page, *parts))
    assert opened.errors == []
    opened.context.close()


def zoom(page: Any) -> None:
    """Show some seconds from the middle of the run."""
    page.evaluate("const end = Watch.timeline.view.overview.end_s; Watch.timeline.show(end * 0.62, end * 0.62 + 6)")
    page.wait_for_timeout(800)


def choose(page: Any) -> None:
    """Open a group that was trained on, whose rewards differ, with tokens if they are recorded."""
    page.select_option("#rollouts-body select >> nth=0", "trained")
    page.wait_for_timeout(300)
    page.locator(".items button").nth(4).click()
    page.locator(".detail h3").wait_for()
    page.wait_for_timeout(6000)


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        if len(sys.argv) == 3:
            run, lost = Path(sys.argv[1]), Path(sys.argv[2])
        else:
            run = make_run(Path(folder) / "quickstart", "--run.record", "true")
            two = ("--servers.count", "2", "--servers.max_concurrent", "64")
            lost = make_run(Path(folder) / "server-lost", *two, beside=kill_a_server)
        with browser() as chromium:
            with watched(run) as address:
                for scheme in ("light", "dark"):
                    shoot(chromium, address, scheme, ("top", "speed"), color_scheme=scheme)
                shoot(chromium, address, "timeline", ("timeline",), color_scheme="light", prepare=zoom)
                shoot(chromium, address, "rollouts", ("rollouts",), color_scheme="light", prepare=choose)
                narrow = {"viewport": {"width": 360, "height": 740}}
                shoot(chromium, address, "phone", ("top", "learning"), color_scheme="light", **narrow)
            with watched(lost) as address:
                shoot(chromium, address, "failures-light", ("timeline", "ledger"), color_scheme="light")
                shoot(chromium, address, "failures-dark", ("timeline", "ledger"), color_scheme="dark")
            with watched(run, lost) as address:
                shoot(chromium, address, "compare", ("learning", "staleness"), color_scheme="light")


if __name__ == "__main__":
    main()
