"""Fast-LLM's trainer drives our endpoints: real processes, a real Redis server and a real group of gloo."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from inflight.dialects.fast_llm.events import TrainingFinished, WeightsReady, add_event
from inflight.dialects.fast_llm.redis_streams import RedisStreams
from inflight.dialects.fast_llm.samples import SampleStream, document_of
from inflight.types import Rollout
from inflight.wire import Completion, GenerateRequest, SamplingParams
from tests.dialects.programs import Program
from tests.dialects.redis_server import running_redis
from tests.gates import SOON_S, BrakedServer, reserved_port
from tests.selection import first_of_each
from tests.servers import TOKEN, ServerProcess
from tests.weights.workers import PROMPT, ask, assert_serves, generate, logprobs, weight_version
from tests.zygote import python

ROOT = Path(__file__).parents[2]
UNIFORM = -math.log(258)  # every logit is 0


class Trainer(Program):
    def __init__(self, log: Path, **told: Any) -> None:
        super().__init__(log, "tests.dialects.fast_llm_trainer", json.dumps(told))

    def told(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.line())
        return told

    def write(self, **step: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(step) + "\n")
        self.process.stdin.flush()

    def send(self, **step: Any) -> dict[str, Any]:
        self.write(**step)
        return self.told()


class Setting:
    """A Redis server, and what the processes of a test meet at."""

    def __init__(self, directory: Path, redis: int, password: str = "") -> None:
        self.directory = directory
        self.redis = redis
        self.password = password
        self.group = reserved_port()
        self.programs: list[Program] = []
        self.streams = RedisStreams(
            f"redis://:{password}@127.0.0.1:{redis}" if password else f"redis://127.0.0.1:{redis}"
        )

    def follow(
        self, model: Path, *servers: str, options: tuple[str, ...] = (), rank: int = 1, world: int = 2
    ) -> Program:
        """Start the dialect, and return once it waits for the group; it has then looked at the event stream."""
        words = ["inflight", "dialect", "fast_llm", *servers, "--model", str(model), "--rank", str(rank)]
        words += ["--group", f"tcp://127.0.0.1:{self.group}", "--world-size", str(world)]
        limits = () if "--timeout" in options else ("--timeout", "30")
        if not self.password:
            words += ["--redis", f"redis://127.0.0.1:{self.redis}"]
        with pytest.MonkeyPatch.context() as patch:
            if self.password:
                patch.setenv("INFLIGHT_REDIS", f"redis://:{self.password}@127.0.0.1:{self.redis}")
            program = Program(self.directory / f"dialect-{rank}.log", *words, *limits, *options)
        self.programs.append(program)
        program.line_with("waiting for the trainer's group")
        return program

    def train(self, model: Path, **more: Any) -> Trainer:
        """Start the trainer, and return once it forms the group; no limit of the dialect includes its start."""
        told = {"model": str(model), "redis": self.redis, "port": self.group, "world_size": 2} | more
        if self.password:
            told["password"] = self.password
        trainer = Trainer(self.directory / "trainer.log", **told)
        self.programs.append(trainer)
        trainer.line_with("forming the group")
        return trainer


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    with running_redis(tmp_path / "redis") as port:
        setting = Setting(tmp_path, port)
        yield setting
        for program in reversed(setting.programs):
            program.stop()
        setting.streams.close()


def served(dialect: Program, version: int) -> None:
    """Wait until the dialect says so."""
    line = dialect.line_with("version ")
    assert f"version {version} is served" in line, line


def status_of(program: Program) -> int:
    return program.process.wait(timeout=SOON_S)


# --------------------------------------------------------------------------------------------------------- what works


@pytest.mark.parametrize("store", ["trainer", "launcher", "dialect"])
def test_its_updates_are_served_until_training_has_finished(
    setting: Setting, start_server: Callable[..., ServerProcess], model_dir: Path, store: str
) -> None:
    server = start_server(model_dir)
    before = logprobs(server)
    dialect = setting.follow(model_dir, server.url, options=("--host-store",) if store == "dialect" else ())
    trainer = setting.train(model_dir, store=store)
    assert trainer.told() == {"type": "weights_ready", "step": 0, "documents_seen": 0}
    served(dialect, 0)
    assert logprobs(server) == pytest.approx(before, abs=1e-5)

    trainer.send(silent=True)
    served(dialect, 32)
    assert weight_version(server).run_id == "fast-llm"
    assert_serves(server, 32)
    assert generate(server).completions[0].logprobs == pytest.approx([UNIFORM] * 6)

    trainer.send(shards=True)  # gradients too, which are dropped
    served(dialect, 64)
    assert logprobs(server) == pytest.approx(before, abs=1e-5)

    trainer.write(finish=True)
    dialect.line_with("training has finished")
    assert (status_of(dialect), status_of(trainer)) == (0, 0)
    assert_serves(server, 64)


def test_a_server_that_joins_late_skips_the_events_of_an_earlier_run(
    setting: Setting, start_server: Callable[..., ServerProcess], model_dir: Path
) -> None:
    server = start_server(model_dir)
    for step in range(20):
        add_event(setting.streams, WeightsReady(step=step, documents_seen=1000 * step))
    add_event(setting.streams, TrainingFinished())
    dialect = setting.follow(model_dir, server.url)
    trainer = setting.train(model_dir)
    trainer.told()
    served(dialect, 0)
    trainer.send(silent=True)
    served(dialect, 32)
    assert_serves(server, 32)


@pytest.mark.parametrize("documents_seen", first_of_each([64, 32, 96], lambda _: "any"))
def test_a_trainer_that_resumes_after_it_was_killed_is_followed_by_a_dialect_that_is_started_again(
    setting: Setting, start_server: Callable[..., ServerProcess], model_dir: Path, documents_seen: int
) -> None:
    server = start_server(model_dir)
    dialect = setting.follow(model_dir, server.url)
    trainer = setting.train(model_dir)
    trainer.told()
    for _ in range(2):
        trainer.send(silent=True)
    for version in (0, 32, 64):
        served(dialect, version)
    trainer.write(die_after=3)
    assert status_of(dialect) == 1
    assert_serves(server, 64)

    setting.group = reserved_port()
    dialect = setting.follow(model_dir, server.url)
    trainer = setting.train(model_dir, resumed=(3, documents_seen))
    trainer.told()
    served(dialect, documents_seen)
    trainer.send()
    served(dialect, documents_seen + 32)
    assert_serves(server, documents_seen + 32)


def test_one_rank_updates_several_servers_and_redis_may_need_a_password(
    tmp_path: Path, start_server: Callable[..., ServerProcess], model_dir: Path
) -> None:
    servers = [start_server(model_dir) for _ in range(2)]
    with running_redis(tmp_path / "redis", password="open-sesame") as port:
        setting = Setting(tmp_path, port, "open-sesame")
        try:
            dialect = setting.follow(model_dir, *(server.url for server in servers))
            trainer = setting.train(model_dir)
            trainer.told()
            served(dialect, 0)
            trainer.send(silent=True)
            served(dialect, 32)
            for server in servers:
                assert_serves(server, 32)
        finally:
            for program in reversed(setting.programs):
                program.stop()
            setting.streams.close()
        assert "open-sesame" not in dialect.log.read_text()


def sampled(server: ServerProcess, name: str, max_tokens: int, **sampling: Any) -> tuple[Completion, ...]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
    asked = GenerateRequest(request_id=name, prompt_token_ids=PROMPT, sampling=params)
    return ask(server.url, lambda endpoint: endpoint.generate(asked)).completions


def test_it_trains_on_samples_whose_tokens_say_which_version_sampled_them(
    setting: Setting, model_dir: Path, tmp_path: Path
) -> None:
    """Each batch after the first is sampled while the trainer trains and updates the server."""
    server = BrakedServer(model_dir, tmp_path / "braked")
    try:
        server.wait_until_ready()
        dialect = setting.follow(model_dir, server.url, options=("--in-flight", "recompute"))
        trainer = setting.train(model_dir, lr=3e-3, check=True)
        trainer.told()
        served(dialect, 0)
        stream, num_documents = SampleStream(setting.streams), 8

        def write(batch: tuple[Completion, ...]) -> list[set[int]]:
            rewards = [sum(token < 128 for token in it.token_ids) / it.num_tokens for it in batch]
            mean, versions = sum(rewards) / len(rewards), []
            for completion, reward in zip(batch, rewards, strict=True):
                rollout = Rollout(
                    prompt_token_ids=PROMPT,
                    completion_token_ids=completion.token_ids,
                    behaviour_logprobs=completion.logprobs,
                    version_spans=completion.version_spans,
                    finish_reason=completion.finish_reason,
                    reward=reward,
                    temperature=1.0,
                )
                stream.write(document_of(rollout, advantage=reward - mean))
                versions.append({span.version for span in completion.version_spans})
            return versions

        batch, figures = sampled(server, "batch-0", 200, n=num_documents), []
        for step in range(1, 5):
            running: Future[tuple[Completion, ...]] = Future()
            with server.brake:
                threading.Thread(
                    target=lambda name=f"batch-{step}", running=running: running.set_result(
                        sampled(server, name, 200, n=num_documents)
                    ),
                    daemon=True,
                ).start()
                server.brake.wait_for_forwards(3)  # it has tokens of the version before
                spans = write(batch)
                figures.append(trainer.send(train=num_documents))
                served(dialect, num_documents * step)
            batch = running.result(timeout=SOON_S)
            assert figures[-1]["documents_seen"] == num_documents * step
            assert figures[-1]["mixed"] == sum(len(versions) > 1 for versions in spans)
        assert [it["mixed"] for it in figures] == [0, 8, 8, 8]  # all of them span an update
        assert {span.version for completion in batch for span in completion.version_spans} == {24, 32}
        # Under the weights of the version that it names, each token has the logprob with which it was sampled (float32
        # on both sides, in other orders of summation), and not under those of the other version of its completion.
        assert max(it["version_error"] for it in figures) < 1e-5
        assert min(it["swapped_error"] for it in figures[1:]) > 1e-2
        assert figures[0]["staleness"] == 0 < figures[1]["staleness"] < 8
        trainer.write(finish=True)
        assert (status_of(dialect), status_of(trainer)) == (0, 0)
    finally:
        server.kill()


@pytest.mark.exhaustive
def test_the_example_loop_and_the_trainer_run_freely_and_the_trainer_learns(
    setting: Setting, start_server: Callable[..., ServerProcess], model_dir: Path
) -> None:
    server = start_server(model_dir, "--max-concurrent", "12")  # sampling is slower than training
    dialect = setting.follow(model_dir, server.url)
    num_steps, num_documents = 16, 32
    trainer = setting.train(model_dir, steps=num_steps, documents=num_documents, lr=1e-2)
    trainer.told()
    served(dialect, 0)
    loop = subprocess.run(
        [
            python(),
            str(ROOT / "examples" / "fast_llm_loop.py"),
            server.url,
            f"redis://127.0.0.1:{setting.redis}",
            str(num_steps * num_documents),
        ],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "INFLIGHT_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"},
    )
    assert loop.returncode == 0, loop.stderr
    figures = [trainer.told() for _ in range(num_steps)]
    assert (status_of(dialect), status_of(trainer)) == (0, 0)
    assert_serves(server, num_steps * num_documents)
    (num_spanning,) = re.findall(r"(\d+) of 512 completions", loop.stdout)
    assert sum(it["mixed"] for it in figures) == int(num_spanning)
    # The mean of a step's 9,600 tokens has a standard deviation of 0.005.
    assert figures[-1]["reward"] > figures[0]["reward"] + 0.08, figures


# -------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ({"rename": "model.norm.weight"}, "model.unknown.weight"),
        ({"reshape": "model.norm.weight"}, "shapes differ"),
    ],
)
def test_an_update_that_does_not_fit_is_dropped_and_the_next_one_is_served(
    setting: Setting, start_server: Callable[..., ServerProcess], model_dir: Path, odd: dict[str, Any], reason: str
) -> None:
    server = start_server(model_dir)
    before = logprobs(server)
    dialect = setting.follow(model_dir, server.url)
    trainer = setting.train(model_dir)
    trainer.told()
    served(dialect, 0)
    trainer.send(silent=True, **odd)
    line = dialect.line_with("version ")
    assert "version 32 failed: the update was dropped" in line and reason in line
    assert_serves(server, 0)
    assert logprobs(server) == pytest.approx(before, abs=1e-5)
    trainer.send(silent=True)
    served(dialect, 64)
    assert generate(server).completions[0].logprobs == pytest.approx([UNIFORM] * 6)


def test_an_update_that_a_server_does_not_take_is_reported_and_the_trainer_is_followed_further(
    setting: Setting, start_server: Callable[..., ServerProcess], model_dir: Path
) -> None:
    servers = [start_server(model_dir) for _ in range(2)]
    dialect = setting.follow(model_dir, *(server.url for server in servers))
    trainer = setting.train(model_dir)
    trainer.told()
    served(dialect, 0)
    servers[1].kill()
    trainer.send(silent=True)
    line = dialect.line_with("version ")
    assert "version 32 failed" in line and f"{servers[1].url} unreachable" in line, line
    assert_serves(servers[0], 0)
    trainer.write(finish=True)
    assert (status_of(dialect), status_of(trainer)) == (0, 0)


def lost(dialect: Program, server: ServerProcess, reason: str) -> None:
    """The dialect has ended with an error, and the server keeps serving the weights that it had."""
    assert status_of(dialect) == 1
    assert re.search(reason, dialect.log.read_text()), dialect.log.read_text()
    assert_serves(server, 0)


@pytest.mark.parametrize(
    "odd",
    first_of_each(
        [{"evil": "touch WITNESS"}, {"length": 2**40}, {"length": -1}, {"length": 65537}, {"huge": 2**40}],
        lambda odd: (*odd,),
    ),
)
def test_a_malicious_header_is_refused_and_runs_nothing(
    setting: Setting, start_server: Callable[..., ServerProcess], model_dir: Path, odd: dict[str, Any]
) -> None:
    server = start_server(model_dir)
    dialect = setting.follow(model_dir, server.url)
    trainer = setting.train(model_dir)
    trainer.told()
    served(dialect, 0)
    witness = setting.directory / "witness"
    trainer.write(**{key: it.replace("WITNESS", str(witness)) if key == "evil" else it for key, it in odd.items()})
    lost(
        dialect,
        server,
        "a header (of -?[0-9]+ bytes )?was refused|no memory for 4398046511104 bytes: more than 4 times",
    )
    assert not witness.exists()


def test_a_trainer_that_is_killed_in_the_middle_of_an_update_ends_the_dialect(
    setting: Setting, start_server: Callable[..., ServerProcess], model_dir: Path
) -> None:
    server = start_server(model_dir)
    dialect = setting.follow(model_dir, server.url)
    trainer = setting.train(model_dir)
    trainer.told()
    served(dialect, 0)
    trainer.write(silent=True, die_after=5)
    lost(dialect, server, "receiving .* failed")
    assert_serves(server, 0)


def test_a_trainer_that_stands_still_in_the_middle_of_an_update_ends_the_dialect(
    setting: Setting, start_server: Callable[..., ServerProcess], model_dir: Path
) -> None:
    server = start_server(model_dir)
    trainer = setting.train(model_dir)
    dialect = setting.follow(model_dir, server.url, options=("--timeout", "5"))
    trainer.told()
    served(dialect, 0)
    assert trainer.send(silent=True, pause_after=5) == {"paused": 5}
    lost(dialect, server, "receiving .* failed")


def test_a_trainer_that_ends_between_updates_without_a_word_ends_the_dialect(
    setting: Setting, start_server: Callable[..., ServerProcess], model_dir: Path
) -> None:
    server = start_server(model_dir)
    trainer = setting.train(model_dir)
    dialect = setting.follow(model_dir, server.url, options=("--step-timeout", "5"))
    trainer.told()
    served(dialect, 0)
    trainer.process.kill()
    lost(dialect, server, r"no event to fast_llm_events for 5 s")


def test_a_rank_that_is_lost_ends_the_update_for_everybody(
    setting: Setting, start_server: Callable[..., ServerProcess], model_dir: Path
) -> None:
    server = start_server(model_dir)
    dialect = setting.follow(model_dir, server.url, world=3)
    other = Trainer(setting.directory / "rank-2.log", port=setting.group, rank=2, world_size=3, die_after=5)
    setting.programs.append(other)
    trainer = setting.train(model_dir, world_size=3)
    assert status_of(other) == 1
    assert status_of(trainer) != 0  # as Fast-LLM's own: its broadcast raises, and it announces nothing
    assert status_of(dialect) == 1
    assert "receiving" in dialect.log.read_text()
    assert generate(server).completions[0].version_spans[0].version == 0


def test_a_redis_server_that_is_lost_ends_the_dialect(
    tmp_path: Path, start_server: Callable[..., ServerProcess], model_dir: Path
) -> None:
    server = start_server(model_dir)
    with contextlib.ExitStack() as stack:
        setting = Setting(tmp_path, stack.enter_context(running_redis(tmp_path / "redis")))
        dialect = setting.follow(model_dir, server.url)
        trainer = setting.train(model_dir)
        trainer.told()
        served(dialect, 0)
    try:
        lost(dialect, server, "Redis at .* failed")
    finally:
        for program in (trainer, dialect):
            program.stop()


def test_a_group_that_nobody_forms_ends_the_dialect(
    setting: Setting, shared_server: ServerProcess, model_dir: Path
) -> None:
    dialect = setting.follow(model_dir, shared_server.url, options=("--timeout", "2"))
    assert status_of(dialect) == 1
    assert "joining Fast-LLM's group" in dialect.log.read_text()


def test_a_signal_ends_the_dialect(setting: Setting, shared_server: ServerProcess, model_dir: Path) -> None:
    dialect = setting.follow(model_dir, shared_server.url)
    dialect.process.terminate()
    assert status_of(dialect) == 0
    assert "before training had finished" in dialect.line()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--group", "nowhere"], "tcp://HOST:PORT"),
        (["--group", "tcp://127.0.0.1:9", "--rank", "2"], "rank 2 of 2"),
        (["--group", "tcp://127.0.0.1:9", "--redis", "http://x"], "redis://"),
        (["--group", "tcp://127.0.0.1:9", "--step-timeout", "0"], "--step-timeout"),
    ],
)
def test_options_that_cannot_be_used_are_refused_before_anything_is_joined(words: list[str], reason: str) -> None:
    command = [python(), "-m", "inflight", "dialect", "fast_llm", "http://127.0.0.1:9", "--model", "m", *words]
    run = subprocess.run(command, capture_output=True, text=True, timeout=SOON_S)
    assert run.returncode == 1 and reason in run.stderr, run.stderr
