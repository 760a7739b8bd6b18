"""Agents in processes of their own, and the proxy as a service of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from inflight.environments.adapters.agent import AgentCommand
from inflight.environments.play_loop import PlayLoop
from inflight.environments.playing import play
from inflight.environments.proxy.episode_service import EpisodeService, rollout_json
from inflight.environments.proxy.run_server import ProxyServer
from inflight.environments.recording import PlayedEpisode
from inflight.environments.transcripts import ChatTemplate
from inflight.errors import TaskError
from inflight.http.client import HttpEndpoint
from inflight.model.checkpoints import load_tokenizer
from inflight.rollouts import load_task
from inflight.run.config import load_config
from inflight.types import Rollout, TeacherScores, Turn
from inflight.wire import PromptImage, RoutedExperts, SamplingParams, VersionSpan
from tests.environments.proxied import check_every_token_is_trained_once, episode_on
from tests.gates import wait_until
from tests.servers import TOKEN, ServerProcess
from tests.zygote import python

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]
ASKS = """
import json, os, sys, urllib.request
item = json.loads(sys.stdin.readline())
def post(url, body):
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return json.load(opener.open(request, timeout=60))
messages = [{"role": "user", "content": item["question"]}]
for turn in range(2):
    answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"model": "m", "messages": messages})
    messages += [answer["choices"][0]["message"], {"role": "user", "content": "and?"}]
"""
ENDS = {
    "posts": 'post(os.environ["INFLIGHT_REWARD_URL"], {"reward": 0.25})',
    "prints": 'print("thinking"); print(json.dumps({"reward": 0.25}))',
    "leaves a process": """
import subprocess
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
print(json.dumps({"reward": 0.25}))
""",
    "detaches a process": """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(json.dumps({"reward": 0.25}))
""",
    "plays two roles": """
for reward, (role, url) in enumerate(item["roles"].items()):
    post(url + "/chat/completions", {"model": "m", "messages": messages[:1]})
    post(url.removesuffix("v1") + "reward", {"reward": reward})
""",
    "gives none": 'print("no idea", file=sys.stderr)',
    "fails": 'print(json.dumps({"reward": 0.25})); raise ZeroDivisionError("on purpose")',
    "tells secrets": 'print(json.dumps({"reward": float("INFLIGHT_TOKEN" in os.environ)}))',
    "hangs": """
import subprocess, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
open(item["pids"] + "~", "w").write(f"{os.getpid()} {child.pid}")
os.rename(item["pids"] + "~", item["pids"])
time.sleep(3600)
""",
}


def played(
    server: ServerProcess,
    model: Path,
    tmp_path: Path,
    end: str,
    cancel_at: Path | None = None,
    roles: Sequence[str] = (),
    **item: Any,
) -> PlayedEpisode | None:
    """Play one episode of an agent that asks twice. If a path is given, cancel the episode once it exists."""
    script, tasks = tmp_path / "agent.py", tmp_path / "tasks.jsonl"
    script.write_text(ASKS + ENDS[end])
    tasks.write_text(json.dumps({"question": "why?", **item}) + "\n")
    name = "inflight.environments.adapters.agent:AgentCommand"
    params = {"command": [sys.executable, str(script)], "tasks": str(tasks), "roles": roles}
    environment: Any = load_task(name, params, 0)

    async def run() -> PlayedEpisode | None:
        async with (
            contextlib.aclosing(HttpEndpoint(server.url)) as endpoint,
            ProxyServer("tiny") as proxy,
            contextlib.aclosing(PlayLoop()) as loop,
        ):
            episode = episode_on(endpoint, ChatTemplate(load_tokenizer(model)), proxy)
            playing = asyncio.ensure_future(play(environment, environment.item(3), episode, loop, 60.0))
            if cancel_at is not None:
                await asyncio.to_thread(wait_until, cancel_at.exists)
                playing.cancel()
                await asyncio.wait({playing}, timeout=30)
                assert playing.cancelled()
                return None
            result = await playing
            check_every_token_is_trained_once(episode)
            return result

    return asyncio.run(asyncio.wait_for(run(), 90))


@pytest.mark.parametrize("end", ["posts", "prints", "leaves a process", "detaches a process"])
def test_an_agent_in_its_own_process_plays_an_episode(
    shared_server: ServerProcess, model_dir: Path, tmp_path: Path, end: str
) -> None:
    result = played(shared_server, model_dir, tmp_path, end)
    assert result is not None
    assert (result.failure, result.reward, len(result.calls)) == (None, 0.25, 2)
    (rollout,) = result.rollouts(0, 1.0)
    assert len(rollout.turns) == 2


def test_an_agent_plays_several_roles_under_urls_of_their_own(
    shared_server: ServerProcess, model_dir: Path, tmp_path: Path
) -> None:
    result = played(shared_server, model_dir, tmp_path, "plays two roles", roles=["white", "black"])
    assert result is not None
    assert (result.failure, result.reward) == (None, 0.5)
    rewards = {(rollout.role, rollout.reward) for rollout in result.rollouts(0, 1.0)}
    assert rewards == {("", 0.5), ("white", 0.0), ("black", 1.0)}


def test_the_example_of_an_agent_plays_its_episodes(shared_server: ServerProcess, model_dir: Path) -> None:
    """With the parameters of its configuration, except for the interpreter."""
    task = load_config(ROOT / "examples" / "agent.toml").task
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["inflight.tasks"][task.name]
    params = {**task.params, "command": [sys.executable, *task.params["command"][1:]], "directory": str(ROOT)}
    environment: Any = load_task(entry, params | {"tasks": str(ROOT / task.params["tasks"])}, 0)

    async def run() -> PlayedEpisode:
        async with contextlib.aclosing(HttpEndpoint(shared_server.url)) as endpoint, ProxyServer("tiny") as proxy:
            episode = episode_on(endpoint, ChatTemplate(load_tokenizer(model_dir)), proxy)
            async with contextlib.aclosing(PlayLoop()) as loop:
                return await play(environment, environment.item(0), episode, loop, 60.0)

    result = asyncio.run(asyncio.wait_for(run(), 90))
    assert result.failure is None
    assert 1 <= len(result.calls) <= 3


@pytest.mark.parametrize(
    ("end", "words"), [("gives none", ("reported no reward", "no idea")), ("fails", ("status 1", "on purpose"))]
)
def test_what_an_agent_does_wrong_is_told_with_the_end_of_its_standard_error(
    shared_server: ServerProcess, model_dir: Path, tmp_path: Path, end: str, words: tuple[str, ...]
) -> None:
    result = played(shared_server, model_dir, tmp_path, end)
    assert result is not None
    assert result.failure_kind == "raised"
    for word in words:
        assert word in str(result.failure)


def test_an_agent_does_not_inherit_the_control_token(
    shared_server: ServerProcess, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFLIGHT_TOKEN", "secret")
    result = played(shared_server, model_dir, tmp_path, "tells secrets")
    assert result is not None
    assert result.reward == 0.0


def test_a_cancelled_agent_ends_with_all_that_it_started(
    shared_server: ServerProcess, model_dir: Path, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    played(shared_server, model_dir, tmp_path, "hangs", cancel_at=pids, pids=str(pids))
    for pid in map(int, pids.read_text().split()):
        wait_until(lambda pid=pid: not is_running(pid))  # type: ignore[misc]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"command": "python x.py", "tasks": "x"}, "list of words"),
        ({"command": ["x"], "tasks": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"command": ["x"], "tasks": "nowhere:f"}, "nowhere"),
        ({"command": ["x"]}, "tasks"),
        ({"command": ["x"], "tasks": "x:f", "roles": "white"}, "roles must be a list"),
        (
            {"command": ["no-such-agent"], "tasks": f"{__name__}:question"},
            "the agent's program 'no-such-agent' does not exist",
        ),
    ],
)
def test_parameters_of_an_agent_that_cannot_work_are_refused(params: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        load_task("inflight.environments.adapters.agent:AgentCommand", params, 0)


def test_items_come_from_a_function_too() -> None:
    environment = AgentCommand(0, ["true"], "tests.environments.test_agents:question")
    assert environment.item(4).prompt == "4?"
    assert environment.item(4).metadata == {"question": "4?", "answer": 5}


def question(index: int) -> dict[str, Any]:
    return {"question": f"{index}?", "answer": index + 1}


# ---------------------------------------------------------------------------------------------------------------
# inflight proxy


@pytest.fixture(scope="module")
def service(shared_server: ServerProcess, model_dir: Path) -> Iterator[str]:
    """The URL of ``inflight proxy``, with room for three episodes, which are forgotten after two seconds."""
    command = [python(), "-m", "inflight", "proxy", shared_server.url, "--model", str(model_dir), "--port", "0"]
    command += ["--max-episodes", "3", "--idle-timeout", "2", "--max-tokens", "8"]
    environment = {**os.environ, "INFLIGHT_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    try:
        assert process.stdout is not None
        found = re.search(r"serving episodes at (\S+),", process.stdout.readline())
        assert found
        yield found[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait(timeout=10)
        process.stdout.close()


def test_a_codebase_of_its_own_gets_rollouts_from_the_service(service: str) -> None:
    with httpx.Client(trust_env=False, timeout=60, headers={"authorization": f"Bearer {TOKEN}"}) as own:
        made = own.post(f"{service}/episodes", json={"temperature": 0.7, "seed": 5}).json()
        with httpx.Client(trust_env=False, timeout=60) as agent:
            messages: list[Any] = [{"role": "user", "content": "go"}]
            sampled = []
            for _ in range(2):
                answer = agent.post(
                    made["openai_url"] + "/chat/completions", json={"messages": messages, "return_token_ids": True}
                ).json()["choices"][0]
                sampled.append((answer["token_ids"], answer["token_logprobs"]))
                messages += [answer["message"], {"role": "user", "content": "on"}]
        finished = own.post(f"{service}/episodes/{made['key']}/finish", json={"reward": 0.5}).json()
        assert finished["reward"] == 0.5
        (rollout,) = finished["rollouts"]
        assert (rollout["temperature"], rollout["reward"]) == (0.7, 0.5)
        for turn, (token_ids, logprobs) in zip(rollout["turns"], sampled, strict=True):
            assert rollout["completion_token_ids"][turn["start"] : turn["end"]] == token_ids
            assert rollout["behaviour_logprobs"][turn["start"] : turn["end"]] == logprobs
        again = own.post(f"{service}/episodes/{made['key']}/finish", json={"reward": 0.5})
        assert (again.status_code, again.json()) == (200, finished)  # the first answer may be lost
        unknown = own.post(f"{service}/episodes/unknown/finish", json={"reward": 0.5})
        assert (unknown.status_code, "no such episode" in unknown.text) == (400, True)


def test_a_finished_rollout_is_json_with_all_fields_of_the_dataclass() -> None:
    image = PromptImage(url="data:image/png;base64,AAAA", start=0, num_tokens=1)
    experts = RoutedExperts(num_tokens=1, num_layers=1, num_chosen=2, dtype="uint8", data="/gA=")
    span = VersionSpan(version=4, start=0, end=2)
    rollout = Rollout(
        prompt_token_ids=(1, 2),
        completion_token_ids=[3, 4],
        behaviour_logprobs=[-0.1, -1e-9],
        version_spans=[span],
        finish_reason="stop",
        reward=1.0,
        temperature=0.7,
        turns=[Turn(0, 2, 0.5)],
        episode=3,
        role="white",
        images=[image],
        routed_experts=experts,
        teacher=TeacherScores(0, [-1.0, -2.0], [[5], [6]], [[-1.0], [-2.0]]),
    )
    said = json.loads(json.dumps(rollout_json(rollout)))
    assert set(said) == {field.name for field in dataclasses.fields(Rollout)}
    assert Turn(**said.pop("turns")[0]) == Turn(0, 2, 0.5)
    assert TeacherScores(**said.pop("teacher")) == rollout.teacher
    assert RoutedExperts.model_validate(said.pop("routed_experts")).to_bytes() == b"\xfe\x00"
    assert [PromptImage.model_validate(one) for one in said.pop("images")] == [image]
    assert [VersionSpan.model_validate(one) for one in said.pop("version_spans")] == [span]
    assert said == {
        "prompt_token_ids": [1, 2],
        "completion_token_ids": [3, 4],
        "behaviour_logprobs": [-0.1, -1e-9],
        "finish_reason": "stop",
        "reward": 1.0,
        "temperature": 0.7,
        "episode": 3,
        "role": "white",
    }


def test_a_role_that_is_named_twice_is_refused(service: str) -> None:
    own = {"authorization": f"Bearer {TOKEN}"}
    answer = httpx.post(f"{service}/episodes", json={"roles": ["a", "b", "a"]}, headers=own, trust_env=False)
    assert answer.status_code == 400
    assert "roles: the role 'a' occurs more than once" in answer.json()["error"]["message"]


def test_the_service_takes_its_token_and_bounds_its_episodes(service: str) -> None:
    with httpx.Client(trust_env=False, timeout=60) as client:
        refused = client.post(f"{service}/episodes", headers={"authorization": "Bearer wrong"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        own = {"authorization": f"Bearer {TOKEN}"}
        made = [client.post(f"{service}/episodes", headers=own) for _ in range(4)]
        assert [answer.status_code for answer in made] == [200, 200, 200, 429]
        keys = [answer.json()["key"] for answer in made[:3]]
        assert client.delete(f"{service}/episodes/{keys[0]}").status_code == 401
        assert client.delete(f"{service}/episodes/{keys[0]}", headers=own).status_code == 200
        assert client.post(f"{service}/episodes/{keys[1]}/finish", headers=own).status_code == 400  # no reward
        assert client.post(f"{service}/e/{keys[1]}/reward", json={"reward": 3}).status_code == 200
        assert client.post(f"{service}/episodes/{keys[1]}/finish", headers=own).json() == {
            "reward": 3.0,
            "rollouts": [],
        }
        wait_until(lambda: client.post(f"{service}/episodes", headers=own).status_code != 429 and True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stream", [False, True])
def test_an_episode_of_the_service_goes_on_at_another_server_when_its_own_is_killed(
    start_server: Callable[..., ServerProcess], model_dir: Path, stream: bool
) -> None:
    servers = [start_server(model_dir) for _ in range(2)]

    async def run() -> None:
        endpoints = [HttpEndpoint(server.url) for server in servers]
        service = EpisodeService(
            ChatTemplate(load_tokenizer(model_dir)),
            SamplingParams(max_tokens=8),
            token=TOKEN,
            model="tiny",
            max_episodes=8,
            idle_timeout_s=60.0,
        )
        await service.attach(endpoints)
        transport = httpx.ASGITransport(service.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy", timeout=60) as client:
            own = {"authorization": f"Bearer {TOKEN}"}
            made = (await client.post("/episodes", json={"roles": ["a", "b"], "seed": 3}, headers=own)).json()
            for role in ("a", "b"):
                messages: list[Any] = [{"role": "user", "content": "go"}]
                for turn in range(3):
                    if (role, turn) == ("a", 2):
                        servers[0].kill()
                    url = made["roles"][role]["openai_url"]
                    body = {"messages": messages, "stream": stream}
                    answer = await client.post(f"{url}/chat/completions", json=body)
                    assert answer.status_code == 200, answer.text
                    messages += [_said(answer.text, stream), {"role": "user", "content": "on"}]
                reward = {"reward": {"a": 1.0, "b": 0.0}[role]}
                assert (await client.post(url.removesuffix("v1") + "reward", json=reward)).status_code == 200
            finished = (await client.post(f"/episodes/{made['key']}/finish", headers=own)).json()
            assert finished["reward"] == 0.5
            assert [(len(it["turns"]), it["role"], it["reward"]) for it in finished["rollouts"]] == [
                (3, "a", 1.0),
                (3, "b", 0.0),
            ]
            assert len(service.episodes) == 0
            servers[1].kill()
            made = (await client.post("/episodes", headers=own)).json()
            body = {"messages": [{"role": "user", "content": "go"}], "stream": stream}
            lost = await client.post(made["openai_url"] + "/chat/completions", json=body)
            assert (lost.status_code, lost.json()["error"]["code"]) == (409, "episode_over")
        for endpoint in endpoints:
            await endpoint.aclose()

    asyncio.run(asyncio.wait_for(run(), 100))


def _said(text: str, stream: bool) -> dict[str, Any]:
    if not stream:
        message: dict[str, Any] = json.loads(text)["choices"][0]["message"]
        return message
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return {"role": "assistant", "content": "".join(it["choices"][0]["delta"].get("content") or "" for it in chunks)}


def test_the_loop_of_the_episodes_runs_between_the_starts_of_two_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    async def start(*_: Any, **__: Any) -> Any:
        seen.append("start")  # where the real one blocks the loop
        await asyncio.sleep(0)
        raise FileNotFoundError

    class OneUrl:
        seed = 0

        async def openai_url(self, role: str = "") -> str:
            return "http://127.0.0.1:1/e/KEY/v1"

    async def heartbeat() -> None:
        while True:
            seen.append("beat")
            await asyncio.sleep(0)

    async def main() -> None:
        agent = AgentCommand(0, command=["true"], tasks=f"{__name__}:item_of")
        beating = asyncio.create_task(heartbeat())
        plays = (agent.play(agent.item(i), cast(Any, OneUrl())) for i in range(8))
        failures = await asyncio.gather(*plays, return_exceptions=True)
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        assert all(isinstance(failure, TaskError) for failure in failures)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    asyncio.run(main())
    assert seen.count("start") == 8
    assert ("start", "start") not in set(itertools.pairwise(seen))


def item_of(index: int) -> dict[str, Any]:
    return {"question": "?"}
