"""What a page shows of the events of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from inflight.errors import ConfigError, InvalidRequestError
from inflight.observe.trace import events
from inflight.observe.trace.files import EventFollower, begin_files
from inflight.observe.watch import views
from inflight.observe.watch.lanes import Lane
from inflight.observe.watch.model import RunModel
from inflight.observe.watch.report import write_report
from inflight.observe.watch.series import NUM_BINS, StepTable, TimeBins
from tests.watch.recorded import OTHER, SERVER, WrittenRun


def folded(directory: Path) -> RunModel:
    run, follower = RunModel(directory), EventFollower(directory)
    run.fold(follower.read())
    follower.close()
    return run


def a_run(directory: Path, num_steps: int = 3) -> WrittenRun:
    run = WrittenRun(directory)
    run.began()
    for version in range(1, num_steps + 1):
        run.step(version)
    return run


def test_a_run_is_shown_as_its_events_say(tmp_path: Path) -> None:
    written = a_run(tmp_path, 2)
    written.step(3, littles_law={"age": 2.0, "expected_age": 2.5})
    written.ended(4.0, 3)
    run = folded(tmp_path)
    seen = views.overview(run, ["reward", "littles_law.expected_age", "no such metric"])
    assert (seen["status"], seen["version"], seen["num_steps"]) == ("finished", 3, 10)
    assert seen["steps"]["series"]["littles_law.expected_age"]["mean"][-1] == 2.5
    assert seen["steps"]["series"]["reward"]["mean"] == pytest.approx([0.1, 0.2, 0.3])
    assert "no such metric" not in seen["steps"]["series"]
    assert seen["ages"] == [0, 6]
    # Tokens of version 0 and 1, trained by steps that began from versions 0, 1 and 2; a negative lag counts as none.
    assert seen["lags"] == [10 + 20 + 20, 10 + 20, 10]
    assert seen["ledger"]["trained"] == 3
    (server,) = seen["servers"]
    assert (server["name"], server["version"], server["num_tokens"], server["num_errors"]) == (SERVER, 3, 90, 0)
    width = seen["rates"]["width_s"]
    assert sum(seen["rates"]["tokens"][SERVER]) * width == pytest.approx(90, rel=0.01)


def test_the_time_that_a_server_was_paused_is_missing_unless_it_reports_timings(tmp_path: Path) -> None:
    written = WrittenRun(tmp_path)
    written.began()
    written.publish(1, paused_s=None)
    (server,) = views.overview(folded(tmp_path), [])["servers"]
    assert server["paused_s"] is None
    written.publish(2)
    (server,) = views.overview(folded(tmp_path), [])["servers"]
    assert server["paused_s"] == 0.004


def test_a_timeline_has_a_lane_for_each_server_rank_and_the_publishes(tmp_path: Path) -> None:
    a_run(tmp_path)
    lanes = views.timeline(folded(tmp_path), 0.0, 4.0, 800)["lanes"]
    assert [lane["key"] for lane in lanes] == [f"server {SERVER}", "rank 0", "rank 1", "publish"]
    start_s, end_s, row, (item, num_tokens, versions, outcome, turns) = lanes[0]["spans"][0]
    assert (start_s, end_s, row, item, num_tokens, outcome, turns) == (0.0, 0.8, 0, 0, 30, 0, [])
    assert versions == [(pytest.approx(1 / 3, abs=1e-4), 0), (1.0, 1)]
    assert {row for _, _, row, _ in lanes[3]["spans"]} == {0, 1, 2, 3, 4}
    only_second = views.timeline(folded(tmp_path), 1.0, 1.5, 800)["lanes"][0]["spans"]
    assert [facts[0] for _, _, _, facts in only_second] == [1]


@pytest.mark.parametrize("window", [(1.0, 1.0, 10), (math.nan, 1.0, 10), (0.0, math.inf, 10), (0.0, 1.0, 0)])
def test_a_window_that_cannot_be_drawn_is_refused(tmp_path: Path, window: tuple[float, float, int]) -> None:
    with pytest.raises(InvalidRequestError):
        views.timeline(RunModel(tmp_path), *window)


def test_a_directory_without_events_is_an_empty_run(tmp_path: Path) -> None:
    seen = views.overview(folded(tmp_path), ["reward"])
    assert (seen["status"], seen["steps"]["versions"], seen["servers"]) == ("empty", [], [])
    assert views.timeline(folded(tmp_path), 0.0, 1.0, 100)["lanes"] == []


def test_a_resumed_run_forgets_what_its_checkpoint_did_not_have(tmp_path: Path) -> None:
    a_run(tmp_path, 4)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))
    resumed = WrittenRun(tmp_path)
    resumed.began(2.0, version=2, began_at=1.7e9 + 100)
    resumed.step(3, reward=0.9)
    run = folded(tmp_path)
    seen = views.overview(run, ["reward"])
    assert seen["steps"]["series"]["reward"]["mean"] == pytest.approx([0.1, 0.2, 0.9])
    assert seen["version"] == 3
    assert [mark["kind"] for mark in seen["marks"]] == ["resumed"]
    spans = views.timeline(run, 0.0, 9.0, 100)["lanes"][0]["spans"]
    assert [facts[0] for _, _, _, facts in spans] == [0, 1, 2]
    assert sum(seen["lags"]) == 90
    assert views.rollouts(run, "", "newest", 0, 50)["counts"] == {"trained": 3}


def test_servers_of_an_ended_process_have_left_unless_they_are_heard_of_again(tmp_path: Path) -> None:
    written = a_run(tmp_path, 2)
    written.request(90, 1.5, endpoint=OTHER)
    written.publish(2)
    resumed = WrittenRun(tmp_path)
    resumed.began(2.0, version=2, began_at=1.7e9 + 100)
    resumed.request(91, 2.5, endpoint=OTHER)
    states = {it["name"]: it["state"] for it in views.overview(folded(tmp_path), [])["servers"]}
    assert states == {SERVER: "left", OTHER: "healthy"}


def test_the_ledger_of_a_finished_run_is_that_of_its_end(tmp_path: Path) -> None:
    written = a_run(tmp_path, 2)
    ledger = {"trained": 2, "dropped": {"stale": 3}, "requeued": 4, "outstanding": 5}
    written.ended(4.0, 2, ledger=ledger)
    assert views.overview(folded(tmp_path), [])["ledger"] == ledger


def test_steps_that_come_again_replace_those_that_were_read(tmp_path: Path) -> None:
    a_run(tmp_path, 4)
    run, follower = RunModel(tmp_path), EventFollower(tmp_path)
    run.fold(follower.read())
    metrics = tmp_path / "metrics.jsonl"
    rows = metrics.read_text().splitlines(keepends=True)[:2]
    metrics.unlink()
    metrics.write_text("".join(rows))
    WrittenRun(tmp_path).began(2.0, version=2, began_at=1.7e9 + 100)
    run.fold(follower.read())
    follower.close()
    assert views.overview(run, ["reward"])["steps"]["versions"] == [1, 2]


def test_a_new_run_in_the_directory_is_shown_as_if_the_old_one_had_never_been(tmp_path: Path) -> None:
    written = a_run(tmp_path, 4)
    written.request(7, 1.0, endpoint=OTHER, error="the server disconnected")
    written.write(events.Failure, 4.0, what="disk full")
    run, follower = RunModel(tmp_path), EventFollower(tmp_path)
    run.fold(follower.read())
    begin_files(tmp_path)
    again = WrittenRun(tmp_path)
    again.began(began_at=1.7e9 + 100)
    run.fold(follower.read())
    expected, seen = views.overview(folded(tmp_path), ["reward"]), views.overview(run, ["reward"])
    assert (seen.pop("number"), expected.pop("number")) == (1, 0)
    assert seen["revision"] != expected.pop("revision"), "the page is notified of it"
    seen.pop("revision")
    assert seen == expected
    again.step(1)
    run.fold(follower.read())
    follower.close()
    assert views.overview(run, ["reward"])["steps"]["versions"] == [1]
    assert views.rollouts(run, "", "newest", 0, 50) == views.rollouts(folded(tmp_path), "", "newest", 0, 50)
    assert views.timeline(run, 0.0, 9.0, 100) == views.timeline(folded(tmp_path), 0.0, 9.0, 100)


def test_parts_of_events_that_are_full_and_compressed_are_read_too(tmp_path: Path) -> None:
    a_run(tmp_path, 2)
    events_file = tmp_path / "events.jsonl"
    (tmp_path / "events.1.jsonl.zst").write_bytes(zstandard.compress(events_file.read_bytes()))
    events_file.unlink()
    written = WrittenRun(tmp_path)
    written.began(2.0, version=2)
    written.step(3)
    run = folded(tmp_path)
    spans = views.timeline(run, 0.0, 9.0, 100)["lanes"][0]["spans"]
    assert [facts[0] for _, _, _, facts in spans] == [0, 1, 2]
    assert views.overview(run, [])["marks"] == [], "a new file is no new incarnation"


def test_what_is_not_a_number_is_left_out_and_told(tmp_path: Path) -> None:
    written = a_run(tmp_path, 2)
    written.step(3, reward=None, gradient_norm=math.nan, ledger=None, note="text")
    written.step(4, gradient_norm=1.5, entropy=math.inf)
    seen = views.overview(folded(tmp_path), ["reward", "gradient_norm", "entropy"])
    assert seen["steps"]["not_finite"] == {"gradient_norm": 3, "entropy": 4}
    assert [math.isnan(it) for it in seen["steps"]["series"]["reward"]["mean"]] == [False, False, True, False]
    assert "note" not in seen["steps"]["names"]


def test_lost_requests_failed_publishes_and_dead_servers_are_failures(tmp_path: Path) -> None:
    written = a_run(tmp_path, 1)
    written.request(7, 1.0, endpoint=OTHER, error="the server disconnected")
    written.request(8, 1.0, error="cancelled")
    written.publish(2, outcome="unreachable")
    written.write(events.FleetChanged, 2.0, version=1, changes=((OTHER, "healthy", "dead"),))
    written.write(events.ItemDropped, 2.1, reason="three tries", item=7, what="no server answered")
    written.write(events.ItemDropped, 2.1, reason="stale", item=8)
    written.write(events.Failure, 3.0, what="disk full")
    seen = views.overview(folded(tmp_path), [])
    expected = {"request lost": 1, "publish": 1, "server": 1, "dropped: three tries": 1, "run": 1}
    assert (seen["status"], seen["num_failures"]) == ("failed", expected)
    states = {server["name"]: server["state"] for server in seen["servers"]}
    assert states == {SERVER: "healthy", OTHER: "dead"}


def test_a_continued_completion_counts_its_tokens_once(tmp_path: Path) -> None:
    written = WrittenRun(tmp_path)
    written.began()
    written.request(0, 0.0, num_tokens=10, spans=((0, 10, 0),), finish_reason="abort")
    written.request(0, 1.0, endpoint=OTHER, num_tokens=30, spans=((0, 10, 0), (10, 30, 1)))
    run = folded(tmp_path)
    tokens = {server["name"]: server["num_tokens"] for server in views.overview(run, [])["servers"]}
    assert tokens == {SERVER: 10, OTHER: 20}
    assert views.timeline(run, 0, 3, 100)["lanes"][1]["spans"][0][3][2] == [(1.0, 1)]


def test_turns_of_an_episode_are_told(tmp_path: Path) -> None:
    written = WrittenRun(tmp_path)
    written.began()
    written.request(0, 0.0, turns=((0.0, 0.2, 10), (0.5, 0.8, 20)))
    run = folded(tmp_path)
    assert views.timeline(run, 0, 1, 100)["lanes"][0]["spans"][0][3][4] == [[0.0, 0.2], [0.5, 0.8]]
    assert views.rollout(run, 0)["parts"][0]["turns"] == [[0.0, 0.2, 10], [0.5, 0.8, 20]]


def test_an_unknown_item_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="item 5"):
        views.rollout(folded(tmp_path), 5)


# ---------------------------------------------------------------------------------------------------------------
# Bins


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.integers(1, 2000))
def test_bins_keep_mean_and_extremes_of_all_steps(values: list[float], stride: int) -> None:
    table = StepTable()
    versions = [1 + i * stride for i in range(len(values))]
    for start in range(0, len(values), 7):
        chunk = slice(start, start + 7)
        table.add(versions[chunk], {"x": values[chunk]})
    bins = table.bins()
    by_bin: dict[int, list[float]] = {}
    for version, value in zip(versions, values, strict=True):
        by_bin.setdefault(version // table.width, []).append(value)
    assert bins == sorted(by_bin)
    assert max(bins) < NUM_BINS
    found = table.values("x", bins)
    close = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(found["mean"], [np.mean(by_bin[i]) for i in bins], **close)
    if table.width > 1:
        np.testing.assert_allclose(found["low"], [min(by_bin[i]) for i in bins], **close)
        np.testing.assert_allclose(found["high"], [max(by_bin[i]) for i in bins], **close)


@given(st.lists(st.tuples(st.floats(0, 5000), st.floats(0, 300), st.floats(0, 1e4)), max_size=30))
def test_amounts_over_time_add_up(spans: list[tuple[float, float, float]]) -> None:
    bins = TimeBins()
    for start, length, amount in spans:
        bins.add("x", start, start + length, amount)
    until_s = NUM_BINS * bins.width_s - 1e-6
    rates = bins.per_second(until_s).get("x", [])
    total = math.fsum(rates) * bins.width_s
    assert total == pytest.approx(math.fsum(amount for _, _, amount in spans), rel=1e-3, abs=1e-3)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 3)), min_size=1, max_size=40))
def test_spans_of_a_lane_do_not_overlap_in_their_rows(spans: list[tuple[float, float]]) -> None:
    lane = Lane("x", "server")
    ordered = sorted((start + length, start) for start, length in spans)
    for end, start in ordered:
        lane.add(start, end, None)
    rows: dict[int, list[tuple[float, float]]] = {}
    for start, end, row, _ in lane.window(0, 20, 10, 1000)["spans"]:
        rows.setdefault(row, []).append((start, end))
    for row in rows.values():
        assert all(one[1] <= other[0] for one, other in zip(sorted(row), sorted(row)[1:], strict=False))
    busy = lane.window(0, 20, 50, 0)["bins"]
    assert sum(busy) * 20 / 50 == pytest.approx(sum(end - start for end, start in ordered), rel=0.02)


# ---------------------------------------------------------------------------------------------------------------
# The report


def test_a_report_holds_everything_and_no_text_can_leave_its_place(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><!--"
    written = a_run(tmp_path)
    written.write(events.Failure, 3.5, what=hostile)
    output = tmp_path / "report.html"
    write_report([tmp_path], output)
    page = output.read_text()
    assert hostile not in page
    assert "src=" not in page.replace('id="data"', "")
    data = json.loads(page.split('<script id="data" type="application/json">')[1].split("</script>")[0])
    (run,) = data["runs"]
    assert run["overview"]["failures"][0]["what"] == hostile
    assert len(run["timeline"][0][0]["lanes"]) == 4
    assert [item["item"] for item in run["rollouts"]["items"]] == [2, 1, 0]
    assert set(run["details"]) == {"0", "1", "2"}


def test_a_report_of_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contains no run events"):
        write_report([tmp_path], tmp_path / "report.html")
