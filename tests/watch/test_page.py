"""The page, from its server and in a real browser."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from inflight.observe.trace import events
from inflight.observe.trace.files import EventFollower, begin_files
from inflight.observe.watch.model import RunModel
from inflight.observe.watch.report import write_report
from inflight.observe.watch.serving import create_app, follow_runs
from tests.gates import SOON_S, wait_until
from tests.watch.recorded import OTHER, WrittenRun, browser
from tests.watch.test_model import a_run, folded
from tests.zygote import python

TOKEN = "secret"
HOSTILE = '<img src=x onerror="window.hurt=1"><script>window.hurt=1</script>'


def client(*directories: Path) -> TestClient:
    return TestClient(create_app([folded(directory) for directory in directories], TOKEN))


@contextlib.contextmanager
def watched(*directories: Path) -> Iterator[str]:
    """Yield the address of a real ``inflight watch``."""
    command = [python(), "-m", "inflight", "watch", *map(str, directories), "--port", "0", "--exit-with-stdin"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
            process.stdin.close()
            assert process.wait(SOON_S) == 0
            assert process.stderr is not None and process.stderr.read() == ""
        finally:
            process.kill()


# ---------------------------------------------------------------------------------------------------------------
# The server


def test_only_who_has_the_token_is_told_of_runs(tmp_path: Path) -> None:
    a_run(tmp_path)
    http = client(tmp_path)
    assert http.get("/").status_code == 200
    for path in ("/api/runs", "/api/runs/0", "/api/runs/0/timeline", "/api/follow", "/api/runs/0/rollouts/0"):
        for given in ({}, {"authorization": "Bearer wrong"}):
            answer = http.get(path, headers=given)
            assert answer.status_code == 401
            assert "token" in answer.json()["error"]
    http.headers["authorization"] = f"Bearer {TOKEN}"
    assert http.get("/api/runs").json() == [{"name": tmp_path.name, "directory": str(tmp_path)}]
    assert http.get("/api/runs/0", params={"names": "reward"}).json()["version"] == 3
    assert len(http.get("/api/runs/0/timeline", params={"from": 0, "to": 4, "width": 500}).json()["lanes"]) == 4
    assert http.get("/api/runs/0/rollouts", params={"limit": 2}).json()["total"] == 3
    assert http.get("/api/runs/0/rollouts/1").json()["item"] == 1


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/api/runs/1", "there is no run 1"),
        ("/api/runs/x", "run must be a number, not 'x'"),
        ("/api/runs/0/timeline?from=0&to=1&width=wide", "width must be a number, not 'wide'"),
        ("/api/runs/0/timeline?from=2&to=1&width=10", "its end must be after its start"),
        ("/api/runs/0/rollouts/99", "item 99"),
    ],
)
def test_a_question_that_cannot_be_answered_says_why(tmp_path: Path, path: str, said: str) -> None:
    a_run(tmp_path)
    answer = client(tmp_path).get(path, headers={"authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 400
    assert said in answer.json()["error"]


def test_a_page_that_is_opened_while_steps_are_read_is_told_all_of_them_at_once(tmp_path: Path) -> None:
    a_run(tmp_path)
    run = RunModel(tmp_path)
    run.reading.has_steps.clear()

    def read_late() -> None:
        follower = EventFollower(tmp_path)
        run.fold(follower.read_steps())
        follower.close()
        run.reading.has_steps.set()

    late = threading.Timer(0.2, read_late)
    late.start()
    http = TestClient(create_app([run], TOKEN))
    seen = http.get("/api/runs/0", headers={"authorization": f"Bearer {TOKEN}"}).json()
    late.join()
    assert seen["steps"]["versions"] == [1, 2, 3]
    with follow_runs([tmp_path]) as (followed,):
        assert followed.reading.has_steps.wait(SOON_S)
        assert followed.steps.last == 3


def test_every_answer_forbids_what_is_not_the_pages() -> None:
    http = TestClient(create_app([RunModel(Path("nowhere"))], TOKEN))
    for path in ("/", "/page/page.js", "/page/page.css", "/page/secret.txt", "/api/runs", "/nothing"):
        headers = http.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_numbers_that_json_lacks_are_null(tmp_path: Path) -> None:
    a_run(tmp_path).step(4, reward=None, gradient_norm=float("nan"))
    answer = client(tmp_path).get(
        "/api/runs/0", params={"names": "reward,gradient_norm"}, headers={"authorization": f"Bearer {TOKEN}"}
    )
    seen = json.loads(answer.text, parse_constant=pytest.fail)
    assert seen["steps"]["series"]["reward"]["mean"][-1] is None


def test_a_directory_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    command = [python(), "-m", "inflight", "watch", str(tmp_path / "none"), "--port", "0"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 1
    assert "there is no run directory" in answer.stderr


# ---------------------------------------------------------------------------------------------------------------
# The page in a browser


class Opened:
    """A page in the browser, with what went wrong in it and what it asked for."""

    def __init__(self, chromium: Any, address: str, **options: Any) -> None:
        self.context = chromium.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda line: line.type == "error" and self.errors.append(line.text))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)
        self.page.wait_for_selector("html[data-ready]", timeout=60_000)

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))


def test_the_page_follows_a_run_and_its_report_needs_no_network(tmp_path: Path) -> None:
    """One browser for all: what a run has, what it gains, hostile text, a narrow screen, keys, themes, the report."""
    written = a_run(tmp_path, 2)
    written.request(50, 1.5, endpoint=OTHER, error=HOSTILE)
    written.write(events.EpisodeFailed, 1.9, item=50, reason="bad reward", what=HOSTILE)
    with browser() as chromium:
        with watched(tmp_path) as address:
            opened = Opened(chromium, address)
            page = opened.page
            assert "2\n" in opened.text(".fact >> nth=0")
            assert "token" not in page.url
            assert HOSTILE in opened.text("#fleet-body")
            page.locator(f".items button[data-item='{50}']").click()
            page.get_by_text("Group 50").wait_for()
            assert HOSTILE in opened.text("#rollouts-body")
            assert page.evaluate("window.hurt") is None

            written.step(3)
            page.locator(".fact dd", has_text="3").first.wait_for(timeout=60_000)
            page.locator(".items button[data-item='2']").wait_for(timeout=60_000)

            check_keys(page)
            check_narrow(page)
            before = page.evaluate("getComputedStyle(document.body).backgroundColor")
            page.click("#theme")
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
            assert opened.errors == []
            assert all(url.startswith((address.partition("#")[0], "data:")) for url in opened.requests)

            check_replaced(page, tmp_path)
            assert opened.errors == []

        report = tmp_path / "report.html"
        write_report([tmp_path], report)
        opened = Opened(chromium, report.as_uri())
        assert "1\n" in opened.text(".fact >> nth=0")
        opened.page.locator(".items button[data-item='60']").click()
        opened.page.get_by_text("Group 60").wait_for()
        assert opened.page.evaluate("window.hurt") is None
        assert opened.page.evaluate("Watch.timeline.view.data.lanes.length") == 5
        assert opened.errors == []
        assert all(url.startswith(("file:", "data:")) for url in opened.requests)


def check_keys(page: Any) -> None:
    """The timeline and the charts are usable without a mouse."""
    page.focus("canvas")
    whole = page.evaluate("Watch.timeline.view.to - Watch.timeline.view.from")
    page.keyboard.press("+")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("Watch.timeline.view.to - Watch.timeline.view.from") < whole * 0.7
    page.keyboard.press("Home")
    assert page.evaluate("Watch.timeline.view.to - Watch.timeline.view.from") == pytest.approx(whole)
    page.keyboard.press("n")
    page.locator(".said", has_text="item").first.wait_for()
    page.keyboard.press("Enter")
    page.locator(".detail h3").wait_for()
    page.focus("figure.chart >> nth=0")
    page.keyboard.press("Home")
    assert "step 1" in page.inner_text("figure.chart >> nth=0")


def check_narrow(page: Any) -> None:
    """A phone shows all of it without scrolling sideways."""
    page.set_viewport_size({"width": 360, "height": 740})
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.set_viewport_size({"width": 1280, "height": 900})


def check_replaced(page: Any, directory: Path) -> None:
    """A new run in the directory is shown from its beginning, and nothing of the one before."""
    page.evaluate("Watch.timeline.show(0.5, 1.0)")
    begin_files(directory)
    again = WrittenRun(directory)
    again.began(began_at=1.7e9 + 100)
    again.request(60, 0.1, endpoint=OTHER, error=HOSTILE)
    again.step(1)
    page.locator(".items button[data-item='60']").wait_for(timeout=60_000)
    page.get_by_text("Choose a group to see its completions.").wait_for()
    page.locator(".fact dd", has_text="1").first.wait_for(timeout=60_000)
    assert page.locator(".items button[data-item='50']").count() == 0
    assert page.evaluate("Watch.timeline.view.isAll")


@pytest.mark.exhaustive
def test_runs_of_every_shape_are_drawn_without_an_error(tmp_path: Path) -> None:
    """An empty run, one with one step, one with NaN, one that was resumed, a long one, and all of them compared."""
    runs = {name: WrittenRun(tmp_path / name) for name in ("empty", "one", "nan", "resumed", "long")}
    a_run(tmp_path / "one", 1)
    a_run(tmp_path / "nan", 2).step(3, reward=float("nan"), gradient_norm=float("inf"), lag_mean=None)
    a_run(tmp_path / "resumed", 4)
    runs["resumed"].began(2.0, 2, began_at=1.7e9 + 500)
    runs["resumed"].step(3)
    a_run(tmp_path / "long", 400)
    with browser() as chromium, watched(*(run.directory for run in runs.values())) as address:
        opened = Opened(chromium, address)
        for name in runs:
            opened.page.select_option("#run-select", label=name)
            opened.page.wait_for_timeout(300)
            assert opened.text("#run-name") == name
        for axis in ("time_s", "num_samples", "version"):
            opened.page.select_option("#axis-select", axis)
        opened.page.fill("#metrics-body input", "reward lag")
        opened.page.locator("#metrics-body figure").nth(1).wait_for()
        assert opened.errors == []


@pytest.mark.parametrize("line", ["{", '{"kind": "group", "item": [], "start_s": "a", "end_s": {}}'])
def test_a_run_whose_events_are_damaged_is_not_shown_as_running(tmp_path: Path, line: str) -> None:
    a_run(tmp_path)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(f"{line}\n")
    with follow_runs([tmp_path]) as runs:
        (run,) = runs
        wait_until(lambda: run.reading.problem)
        assert run.status == "unreadable"
        shown = TestClient(create_app(runs, TOKEN)).get("/api/runs/0", headers={"authorization": f"Bearer {TOKEN}"})
        assert (shown.json()["status"], bool(shown.json()["unreadable"])) == ("unreadable", True)
