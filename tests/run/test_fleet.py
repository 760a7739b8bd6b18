"""Fleets: servers of several kinds, servers that go and come back, and what is refused before anything is started."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from inflight.errors import ConfigError
from inflight.http.client import HttpEndpoint
from inflight.model.checkpoints import load_tokenizer
from inflight.rollouts import Ledger, load_task
from inflight.rollouts.driver_commands import FinishedGroup
from inflight.run.config import load_config
from inflight.run.ranks.group import TrainerGroup
from inflight.run.ranks.messages import Members, PublishResult
from inflight.run.sampling.actor import Actor
from inflight.run.sampling.completions import Completions
from inflight.run.servers.checks import check_endpoint, check_servers
from inflight.types import Group
from inflight.wire import Capabilities, SamplingParams, WeightVersion
from tests.gates import StepGate, reserved_port
from tests.models import make_model
from tests.run.acting import actor_of
from tests.run.runs import CONFIG, ROOT, RunProcess, ends_within
from tests.selection import first_of_each
from tests.servers import TOKEN, ServerProcess

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forks")]

Start = Callable[..., ServerProcess]


@pytest.fixture
def start_run(start_run: Callable[..., RunProcess]) -> Callable[..., RunProcess]:
    return functools.partial(start_run, environment={"INFLIGHT_TOKEN": TOKEN})


@pytest.fixture
def config_file(tmp_path: Path, model_dir: Path) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text(CONFIG.format(directory=tmp_path / "run", model=model_dir))
    return path


def replaced(run: RunProcess, server: ServerProcess, start: Start, model: Path) -> ServerProcess:
    """Kill a server and start a new one on its port, once the run has noticed."""
    server.kill()
    run.wait_for_events("fleet_changed", lambda event: server.url in event.get("removed", ()))
    return started_again(server, start, model)


def started_again(server: ServerProcess, start: Start, model: Path) -> ServerProcess:
    server.kill()
    return start(model, "--port", str(urlsplit(server.url).port))


# ----------------------------------------------------------------------------------------------------- the beginning


def test_a_mixed_fleet_is_started_side_by_side_and_every_member_samples(start_run: Callable[..., RunProcess]) -> None:
    fleet = '[{ engine = "embedded" }, { engine = "embedded", count = 2, max_concurrent = 8 }]'
    run = start_run("--servers.fleet", fleet, "--run.num_steps", "100000")
    run.wait_for_steps(1)
    run.wait_until(lambda: len({group["endpoint"] for group in run.events("group")}) == 3)
    run.interrupt()
    assert run.wait() == 130, run.output()
    pids = run.servers()
    assert len(pids) == 3
    assert len(run.rows()[0]["publish"]["paused_s"]) == 3
    assert all(map(ends_within, pids))
    members = json.loads((run.directory / "config.json").read_text())["servers"]["fleet"]
    assert [(member["engine"], member["count"]) for member in members] == [("embedded", 1), ("embedded", 2)]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"servers.fleet": '[{ engine = "embedded" }]', "servers.count": "2"}, "servers.fleet replaces servers.count"),
        (
            {"servers.fleet": '[{ engine = "embedded" }]', "servers.engine": "vllm"},
            "servers.fleet replaces servers.engine",
        ),
        (
            {"servers.fleet": '[{ engine = "embedded" }]', "servers.attach.urls": '["http://a:1"]'},
            "leave out servers.fleet or the urls",
        ),
        ({"servers.engine": "vllm", "servers.attach.urls": '["http://a:1"]'}, "leave out servers.engine or the urls"),
        (
            {"servers.fleet": '[{ engin = "vllm" }]'},
            "unknown key 'servers.fleet.0.engin'; did you mean servers.fleet.0.engine",
        ),
        (
            {"servers.fleet": "[{ count = 0 }]"},
            "servers.fleet.0.count: Input should be greater than or equal to 1 (got 0)",
        ),
        ({"servers.fleet": "[{ max_concurrent = 2 }]"}, "sampling.group_size 4 exceeds servers.max_concurrent 2"),
        ({"servers.python": "/bin/python3"}, "python and engine_arguments do not apply to engine 'embedded'"),
        (
            {"servers.fleet": '[{ engine_arguments = ["--x"] }]'},
            "python and engine_arguments do not apply to engine 'embedded'",
        ),
        ({"servers.engine": "vllm", "servers.compile": "true"}, "compile does not apply to engine 'vllm'"),
        (
            {"servers.fleet": '[{ engine = "embedded" }]', "servers.compile": "true"},
            "servers.fleet replaces servers.compile",
        ),
        ({"updates.transport": "file"}, "updates.transport 'file' needs updates.directory"),
        (
            {"updates.transport": "shm", "updates.directory": "/x"},
            "updates.directory applies only to updates.transport 'file', but the transport is 'shm'",
        ),
        (
            {"updates.transport": "ftp"},
            "updates.transport: unknown transport 'ftp'; known: file, gloo, http, ipc, nccl, shm",
        ),
        (
            {"updates.mode": "pull"},
            "updates.mode 'pull' stores versions in updates.directory, but updates.transport is 'gloo'",
        ),
        (
            {"updates.mode": "pull", "updates.transport": "file", "updates.directory": "/x", "updates.quorum": "1"},
            "'pull' does not wait for servers",
        ),
        (
            {"updates.mode": "pull", "updates.transport": "file", "updates.directory": "/x", "servers.engine": "vllm"},
            "but vllm does not",
        ),
        (
            {"updates.delta": "true", "updates.encoding": "float8"},
            "updates.encoding is 'float8': leave one of them out",
        ),
        (
            {"updates.encoding": "float4"},
            "updates.encoding: Input should be 'raw', 'bfloat16' or 'float8' (got 'float4')",
        ),
        ({"updates.quorum": "0"}, "updates.quorum: Input should be greater than or equal to 1 (got 0)"),
    ],
)
def test_fields_that_contradict_one_another_are_refused(
    config_file: Path, overrides: dict[str, str], expected: str
) -> None:
    words = [word for key, value in overrides.items() for word in (f"--{key}", value)]
    with pytest.raises(ConfigError) as refused:
        load_config(config_file, words)
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"servers.engine": "vlm"}, "unknown engine 'vlm' (did you mean 'vllm'?); known: dynamo, embedded"),
        (
            {"servers.fleet": '[{ engine = "embedded" }, { engine = "vlm" }]'},
            "unknown engine 'vlm' (did you mean 'vllm'?); known: dynamo, embedded, ",
        ),
        (
            {"servers.attach.urls": '["vlm+http://127.0.0.1:9"]'},
            "unknown engine 'vlm' (did you mean 'vllm'?); known: dynamo, embedded",
        ),
        ({"servers.attach.urls": '["127.0.0.1:9"]'}, "'127.0.0.1:9' is not an endpoint; write http://HOST:PORT"),
        (
            {"servers.attach.urls": '["http://127.0.0.1:9", "http://127.0.0.1:9/"]'},
            "lists http://127.0.0.1:9 more than once",
        ),
        (
            {"servers.engine": "vllm", "servers.python": "/nowhere/python"},
            "servers.python '/nowhere/python' is not an interpreter",
        ),
        ({"servers.count": "2", "updates.quorum": "3"}, "updates.quorum 3 exceeds the number of servers, 2"),
        (
            {"servers.attach.urls_file": "/nowhere/servers.txt"},
            "servers.attach.urls_file '/nowhere/servers.txt' does not exist",
        ),
    ],
)
def test_servers_that_cannot_be_are_refused_before_anything_is_started(
    config_file: Path, overrides: dict[str, str], expected: str
) -> None:
    words = [word for key, value in overrides.items() for word in (f"--{key}", value)]
    with pytest.raises(ConfigError) as refused:
        check_servers(load_config(config_file, words).servers)
    assert expected in str(refused.value)


def test_an_unknown_engine_leaves_no_run_directory(start_run: Callable[..., RunProcess]) -> None:
    run = start_run("--servers.engine", "vlm")
    assert run.wait(60) == 1
    assert (
        "unknown engine 'vlm' (did you mean 'vllm'?); "
        "known: dynamo, embedded, fast_llm, fourphase, pipelinerl, sglang, vllm" in run.output()
    )
    assert "Traceback" not in run.output()
    assert not run.directory.exists()


def test_a_member_of_a_fleet_takes_the_sections_limit_unless_it_has_its_own(config_file: Path) -> None:
    fleet = '[{ engine = "vllm", max_concurrent = 64 }, { engine = "embedded" }]'
    members = load_config(config_file, ["--servers.fleet", fleet, "--servers.max_concurrent", "16"]).servers.members
    assert [member.max_concurrent for member in members] == [64, 16]


def test_a_file_of_urls_starts_no_server_unless_it_is_told_to(config_file: Path) -> None:
    words = ["--servers.attach.urls_file", "servers.txt"]
    assert load_config(config_file, words).servers.members == ()
    (member,) = load_config(config_file, [*words, "--servers.count", "2"]).servers.members
    assert member.count == 2


@pytest.mark.parametrize(
    "how",
    first_of_each(
        [
            {
                "updates.transport": "file",
                "updates.directory": "{directory}/weights",
                "updates.delta": "true",
                "updates.quorum": "1",
            },
            {"updates.transport": "http", "updates.encoding": "bfloat16", "updates.staged": "false"},
        ],
        lambda _: "any",
    ),
    ids=["file", "http"],
)
def test_weights_travel_as_the_run_says(
    start_run: Callable[..., RunProcess], tmp_path: Path, how: dict[str, str]
) -> None:
    words = [word for key, value in how.items() for word in (f"--{key}", value.format(directory=tmp_path))]
    run = start_run(*words, "--run.num_steps", "3")
    assert run.wait() == 0, run.output()
    publish = run.rows()[-1]["publish"]
    # Every weight changes in a step of float32, and a delta that would not be smaller is not sent.
    assert 0 < publish["sent_bytes"] <= publish["size_bytes"] / (2 if how["updates.transport"] == "http" else 1)
    assert list(publish["outcomes"].values()) == ["applied"]
    assert (tmp_path / "weights").exists() == (how["updates.transport"] == "file")


def test_servers_that_pull_go_to_the_newest_version_by_themselves(
    start_run: Callable[..., RunProcess], tmp_path: Path
) -> None:
    words = (
        "--updates.mode",
        "pull",
        "--updates.transport",
        "file",
        "--updates.directory",
        str(tmp_path / "weights"),
    )
    gate = StepGate(tmp_path / "steps", 3)
    run = start_run(*words, "--servers.count", "2", "--run.num_steps", "100000", *gate.settings)

    def all_serve(version: int) -> None:
        run.wait_for_events("served_versions", lambda event: [*event["servers"].values()] == [version] * 2)

    all_serve(3)
    gate.allow(5)
    all_serve(5)
    gate.open()
    run.wait_for_events("group", lambda event: event["newest"] > 0)
    run.interrupt()
    assert run.wait() == 130, run.output()
    last = run.rows()[-1]
    assert len(last["serving"]) == 2
    assert last["publish"]["version"] == last["version"] > 5
    assert last["publish"]["sent_bytes"] == last["publish"]["size_bytes"]


@pytest.mark.parametrize("what", first_of_each(["vocabulary", "dtype"], lambda _: "any"))
def test_a_server_that_serves_another_kind_of_model_is_named_with_what_to_change(
    start_run: Callable[..., RunProcess], start_server: Start, model_dir: Path, tmp_path: Path, what: str
) -> None:
    if what == "dtype":
        server = start_server(model_dir, "--dtype", "bfloat16")
        expected = f"{server.url} does not support dtype float32; it serves tiny in bfloat16: change model.dtype"
    else:
        server = start_server(make_model(tmp_path / "other", vocab_size=300))
        expected = f"{server.url} does not support a vocabulary of 258 tokens; it serves tiny with 300"
    run = start_run("--servers.attach.urls", json.dumps([server.url]))
    assert run.wait(90) == 1
    assert expected in run.output()


# ------------------------------------------------------------------------------------------ servers that go and come


def test_a_server_replaced_on_its_port_gets_work_again_only_once_it_has_the_present_weights(
    start_run: Callable[..., RunProcess], start_server: Start, model_dir: Path
) -> None:
    steady, fickle = start_server(model_dir), start_server(model_dir, "--port", str(reserved_port()))
    run = start_run("--servers.attach.urls", json.dumps([steady.url, fickle.url]), "--run.num_steps", "100000")
    run.wait_for_steps(2)
    replaced(run, fickle, start_server, model_dir)
    (back,) = run.wait_for_events("fleet_changed", lambda event: fickle.url in event["restored"])
    run.wait_for_events("group", lambda event: event["endpoint"] == fickle.url and event["oldest"] >= back["version"])
    run.interrupt()
    assert run.wait() == 130, run.output()
    assert f"{fickle.url} is back, at version {back['version']}" in run.output()
    events = run.events("group", "fleet_changed")
    gone = next(i for i, event in enumerate(events) if fickle.url in event.get("removed", ()))
    groups = [event for event in events[gone:] if event.get("endpoint") == fickle.url]
    assert groups
    assert min(group["oldest"] for group in groups) >= back["version"] > 0
    assert run.summary()["failure"] is None


def test_servers_join_leave_die_and_come_back_as_a_file_lists_them(
    start_run: Callable[..., RunProcess], start_server: Start, model_dir: Path, tmp_path: Path
) -> None:
    listed = tmp_path / "servers.txt"
    first, second = start_server(model_dir), start_server(model_dir, "--port", str(reserved_port()))
    listed.write_text(f"# the fleet\n{first.url}\n\n{second.url}  # same host\n")
    run = start_run(
        "--servers.attach.urls_file", str(listed), "--run.num_steps", "100000", "--updates.transport", "http"
    )
    run.wait_for_steps(2)

    third = start_server(model_dir)
    listed.write_text(f"{first.url}\n{second.url}\nnonsense\n{third.url}\n")
    (joined,) = run.wait_for_events("fleet_changed", lambda event: third.url in event["joined"])
    run.wait_for_events("group", lambda event: event["endpoint"] == third.url)
    assert f"{third.url} has joined, at version {joined['version']}" in run.output()
    assert "line 3 of" in run.output() and "'nonsense' is not an endpoint" in run.output()

    replaced(run, second, start_server, model_dir)
    (back,) = run.wait_for_events("fleet_changed", lambda event: second.url in event["restored"])
    assert second.url in back["serving"]

    listed.write_text(f"{second.url}\n{third.url}\n")
    (left, *_) = run.wait_for_events("fleet_changed", lambda event: first.url in event["left"])

    def asked_since() -> list[str]:  # what it was asked before it left may be answered after that
        return [request["endpoint"] for request in run.events("request") if request["start_s"] > left["end_s"]]

    run.wait_until(lambda: len(asked_since()) >= 16)
    assert first.url not in asked_since()

    run.interrupt()
    assert run.wait() == 130, run.output()
    assert run.summary()["failure"] is None
    groups = [group for group in run.events("group") if group["endpoint"] == third.url]
    assert min(group["oldest"] for group in groups) >= joined["version"] > 0


@pytest.mark.exhaustive
def test_a_run_whose_only_attached_server_comes_back_goes_on(
    start_run: Callable[..., RunProcess], start_server: Start, model_dir: Path
) -> None:
    server = start_server(model_dir, "--port", str(reserved_port()))
    run = start_run("--servers.attach.urls", json.dumps([server.url]), "--run.num_steps", "100000")
    run.wait_for_steps(2)
    replaced(run, server, start_server, model_dir)
    assert "no inference server is left; waiting" in run.output()
    run.wait_for_steps(len(run.rows()) + 2)
    run.interrupt()
    assert run.wait() == 130, run.output()
    (back,) = run.events("fleet_changed")[-1:]
    assert back["restored"] == [server.url]


def test_a_run_whose_attached_servers_stay_away_ends_with_how_each_was_lost(
    start_run: Callable[..., RunProcess], start_server: Start, model_dir: Path
) -> None:
    server = start_server(model_dir)
    limits = ("--run.num_steps", "100000", "--run.start_timeout_s", "15")
    run = start_run("--servers.attach.urls", json.dumps([server.url]), *limits)
    run.wait_for_steps(1)
    server.kill()
    assert run.wait(90) == 1
    assert f"no inference server is left ({server.url}: " in run.output()
    assert "Traceback" not in run.output()
    assert (run.directory / "summary.json").exists()


def test_a_server_that_comes_back_with_another_model_is_named_with_it_when_the_run_ends(
    start_run: Callable[..., RunProcess], start_server: Start, model_dir: Path, tmp_path: Path
) -> None:
    server = start_server(model_dir, "--port", str(reserved_port()))
    limits = ("--run.num_steps", "100000", "--run.start_timeout_s", "15")
    run = start_run("--servers.attach.urls", json.dumps([server.url]), *limits)
    run.wait_for_steps(1)
    other = make_model(tmp_path / "other", vocab_size=300)
    replaced(run, server, start_server, other)
    assert run.wait(90) == 1
    end = run.output().splitlines()[-1]
    assert f"no inference server is left ({server.url}: " in end
    assert "now serves" in end
    assert "with 300 tokens" in end
    assert "Traceback" not in run.output()
    assert (run.directory / "summary.json").exists()


async def publish(trainers: TrainerGroup, urls: Sequence[str]) -> PublishResult:
    published = (await trainers.publish(Members(urls=tuple(urls)))).published
    assert published is not None
    return published


SHARDED = ("--updates.sharded", "true")


@pytest.mark.parametrize(
    ("num_ranks", "updates"), first_of_each([(2, ()), (1, ()), (2, SHARDED)], lambda case: case[1]), ids=str
)
def test_a_server_restarted_between_two_publishes_is_in_the_next_one(
    config_file: Path,
    start_server: Start,
    model_dir: Path,
    num_ranks: int,
    updates: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It knows of no group: the publish is refused, the group formed again, and the publish done again."""
    monkeypatch.setenv("INFLIGHT_TOKEN", TOKEN)
    steady, fickle = start_server(model_dir), start_server(model_dir, "--port", str(reserved_port()))
    urls = [steady.url, fickle.url]

    async def conversation() -> tuple[PublishResult, ...]:
        overrides = ["--servers.attach.urls", json.dumps(urls), "--train.num_ranks", str(num_ranks), *updates]
        config = load_config(config_file, overrides)
        logs = config_file.parent
        trainers = TrainerGroup(config, logs, TOKEN, print)
        await trainers.spawn()
        try:
            first = (await trainers.load_and_connect(Members(urls=tuple(urls)), "restarts", None)).published
            assert first is not None
            fresh = await asyncio.to_thread(started_again, fickle, start_server, model_dir)
            second = await publish(trainers, urls)
            fresh.kill()
            third = await publish(trainers, urls)
            fourth = await publish(trainers, urls)
            await asyncio.to_thread(started_again, fresh, start_server, model_dir)
            return first, second, third, fourth, await publish(trainers, urls)
        finally:
            await trainers.stop()

    first, second, third, fourth, fifth = asyncio.run(conversation())
    assert first.endpoints == second.endpoints == tuple(urls)
    assert "no weight group is formed" in second.notes[0]
    assert third.endpoints == fourth.endpoints == (steady.url,)
    assert third.removed == fourth.removed == (fickle.url,)
    assert fourth.notes == ()
    assert (fifth.endpoints, fifth.removed) == (tuple(urls), ())
    assert fifth.changes == ((fickle.url, "dead", "healthy"),)


def test_every_rank_stores_what_it_holds(
    config_file: Path, start_server: Start, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFLIGHT_TOKEN", TOKEN)
    urls, store = [start_server(model_dir).url], tmp_path / "store"

    async def conversation() -> PublishResult:
        overrides = ["--servers.attach.urls", json.dumps(urls), "--train.num_ranks", "2", *SHARDED]
        overrides += ["--updates.transport", "file", "--updates.directory", str(store)]
        trainers = TrainerGroup(load_config(config_file, overrides), config_file.parent, TOKEN, print)
        await trainers.spawn()
        try:
            published = (await trainers.load_and_connect(Members(urls=tuple(urls)), "shards", None)).published
            assert published is not None
            return published
        finally:
            await trainers.stop()

    published = asyncio.run(conversation())
    assert published.outcomes == {urls[0]: "applied"}
    assert published.sent_bytes == published.size_bytes
    stored = [sum(file.stat().st_size for file in (store / f"rank-{rank}").rglob("*.safetensors")) for rank in (0, 1)]
    assert max(stored) < 0.6 * sum(stored)


@pytest.mark.parametrize("num_ranks", first_of_each([2, 1], lambda _: "any"))
def test_questions_to_the_ranks_wait_for_each_other(
    config_file: Path, start_server: Start, model_dir: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step and a publish to servers that came back may be asked for at the same time."""
    monkeypatch.setenv("INFLIGHT_TOKEN", TOKEN)
    urls = [start_server(model_dir).url]

    async def conversation() -> list[PublishResult]:
        config = load_config(
            config_file, ["--servers.attach.urls", json.dumps(urls), "--train.num_ranks", str(num_ranks)]
        )
        trainers = TrainerGroup(config, config_file.parent, TOKEN, print)
        await trainers.spawn()
        try:
            await trainers.load_and_connect(Members(urls=tuple(urls)), "at-once", None)
            return list(await asyncio.gather(*(publish(trainers, urls) for _ in range(4))))
        finally:
            await trainers.stop()

    answers = asyncio.run(conversation())
    assert [answer.endpoints for answer in answers] == [tuple(urls)] * 4


@pytest.mark.exhaustive
def test_a_publish_without_anybody_to_reach_says_so_and_is_no_failure(
    config_file: Path, start_server: Start, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFLIGHT_TOKEN", TOKEN)
    server = start_server(model_dir, "--port", str(reserved_port()))

    async def conversation() -> tuple[PublishResult, ...]:
        config = load_config(config_file, ["--servers.attach.urls", json.dumps([server.url]), "--train.num_ranks", "2"])
        trainers = TrainerGroup(config, config_file.parent, TOKEN, print)
        await trainers.spawn()
        try:
            await trainers.load_and_connect(Members(urls=(server.url,)), "nobody", None)
            server.kill()
            alone = await publish(trainers, [server.url]), await publish(trainers, [server.url])
            other = make_model(config_file.parent / "other", vocab_size=300)
            await asyncio.to_thread(start_server, other, "--port", str(urlsplit(server.url).port))
            return *alone, await publish(trainers, [server.url])
        finally:
            await trainers.stop()

    first, second, stranger = asyncio.run(conversation())
    assert [answer.endpoints for answer in (first, second, stranger)] == [(), (), ()]
    assert not first.is_published
    assert "now serves tiny in float32 with 300 tokens, but served tiny in float32 with 258 before" in stranger.notes[0]


def test_a_run_that_is_resumed_takes_its_servers_over_and_the_old_trainer_is_stopped(
    start_run: Callable[..., RunProcess], start_server: Start, model_dir: Path, tmp_path: Path
) -> None:
    """The servers hold a later version than the checkpoint when the new trainer comes.

    The new one has a copy of the directory, as on another host: no lock keeps it from starting beside the old one.
    """
    server = start_server(model_dir)
    words = ("--servers.attach.urls", json.dumps([server.url]), "--run.num_steps", "100000")
    words += ("--run.checkpoint_every_steps", "4")
    old_gate, new_gate = StepGate(tmp_path / "old-steps", 7), StepGate(tmp_path / "new-steps", 5)
    old = start_run(*words, *old_gate.settings)
    old.wait_until(lambda: version_of(server).version == 7)  # the last checkpoint is that of step 4
    asleep = [pid for name, pid in old.processes().items() if name == "controller" or name.startswith("trainer")]
    for pid in asleep:
        os.kill(pid, signal.SIGSTOP)
    try:
        before = version_of(server)
        elsewhere = old.directory.with_name("copy")
        shutil.copytree(old.directory, elsewhere)
        new = start_run(*words, *new_gate.settings, "--resume", "--run.directory", str(elsewhere))
        new.directory = elsewhere
        new.wait_until(lambda: (now := version_of(server)).incarnation == 2 and now.version == 5)
        assert version_of(server).run_id == before.run_id
    finally:
        for pid in asleep:
            os.kill(pid, signal.SIGCONT)
    old_gate.open()
    assert old.wait() == 1, old.output()
    assert "incarnation 2 has taken over. Stop this trainer" in old.output()
    assert "Traceback" not in old.output()
    new_gate.open()
    new.wait_for_steps(len(new.rows()) + 2)
    new.interrupt()
    assert new.wait() == 130, new.output()
    assert new.summary()["failure"] is None


def version_of(server: ServerProcess) -> WeightVersion:
    async def ask() -> WeightVersion:
        endpoint = HttpEndpoint(server.url, token=TOKEN)
        try:
            return await endpoint.weight_version()
        finally:
            await endpoint.aclose()

    return asyncio.run(ask())


def test_tokens_older_than_what_was_published_give_a_replaced_server_away(
    shared_server: ServerProcess, model_dir: Path
) -> None:
    """Nothing was running there when it was replaced, so that no connection broke."""

    async def conversation() -> tuple[Actor, list[Group], Ledger]:
        groups: list[Group] = []
        ledger = Ledger()
        endpoint = HttpEndpoint(shared_server.url)
        actor = actor_of(
            Completions(
                load_task("tests.run.tasks:count_letters", {}, 0),
                load_tokenizer(model_dir),
                SamplingParams(n=2, max_tokens=4),
                4096,
                10.0,
            ),
            lambda outcome: groups.append(outcome.group) if isinstance(outcome, FinishedGroup) else None,
            ledger=ledger,
        )
        actor.add(endpoint, 4)
        actor.serve([endpoint.name], 3)  # what it has is version 0
        running = asyncio.ensure_future(actor.run())
        await asyncio.wait_for(actor.unserved.wait(), 60)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await endpoint.aclose()
        return actor, groups, ledger

    actor, groups, ledger = asyncio.run(conversation())
    assert not groups
    assert (ledger.outstanding, ledger.num_trained) == (0, 0)
    assert ledger.num_requeued > 0
    reason = actor.dispatcher.endpoints.lost[shared_server.url]
    assert "version 3 was published to it, but it sampled from version 0" in reason


def test_the_fleet_in_the_docs_is_a_valid_one(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "runs.md").read_text()
    blocks = re.findall(r"^```toml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (block,) = [block for block in blocks if "fleet" in block]
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.split("[servers]")[0].format(directory="runs/x", model="models/x") + block)
    members = load_config(path).servers.members
    assert [member.engine for member in members] == ["vllm", "sglang", "embedded"]
    assert [member.max_concurrent for member in members] == [64, 64, 16]


@pytest.mark.parametrize(("temperature", "is_refused"), [("0.7", True), ("1.0", False)])
def test_raw_logprobs_are_refused_at_any_temperature_but_one(
    config_file: Path, shared_server: ServerProcess, temperature: str, is_refused: bool
) -> None:
    """They leave the temperature out, so that ratios with the trainer's logprobs would be wrong."""

    class RawEndpoint(HttpEndpoint):
        async def capabilities(self) -> Capabilities:
            return (await super().capabilities()).model_copy(update={"logprob_kind": "raw"})

    async def ask() -> Capabilities:
        endpoint = RawEndpoint(shared_server.url)
        try:
            return await check_endpoint(config, 258, endpoint)
        finally:
            await endpoint.aclose()

    config = load_config(config_file, ["--sampling.temperature", temperature])
    if is_refused:
        with pytest.raises(ConfigError, match=r"does not support processed logprobs.* set sampling\.temperature to 1"):
            asyncio.run(ask())
    else:
        assert asyncio.run(ask()).logprob_kind == "raw"


def test_two_runs_on_one_server_never_train_on_each_other_s_tokens(
    tmp_path: Path, model_dir: Path, start_server: Start
) -> None:
    server = start_server(model_dir)
    words = ("--servers.attach.urls", json.dumps([server.url]))
    runs: list[RunProcess] = []
    try:
        for name, num_steps in (("first", "100000"), ("second", "6")):
            directory = tmp_path / name
            settings = ("--run.num_steps", num_steps, "--run.start_timeout_s", "20")
            runs.append(RunProcess(directory, model_dir, *words, *settings, environment={"INFLIGHT_TOKEN": TOKEN}))
            runs[-1].wait_for_steps(4)
        first, second = runs
        assert second.wait() == 0
        assert first.wait() == 1
    finally:
        for run in runs:
            run.kill()
    owner = (second.directory / "run_id").read_text().strip()
    assert f"was taken over by run '{owner}': give each run its own servers" in first.output()
    for run in runs:
        assert all(row["lag_mean"] >= 0 for row in run.rows())
        ids = {event["request_id"] for event in run.events("request")}
        assert ids
        assert all(id.startswith((run.directory / "run_id").read_text().strip()) for id in ids)
