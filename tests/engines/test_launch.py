"""Engines as child processes: what is said when one fails, and that nothing of it stays behind."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from inflight.cli import main
from inflight.contracts import EngineOptions
from inflight.engines import launch, supervise
from inflight.engines.launch import EngineProcess, start_engine, started
from inflight.engines.serving import until_described
from inflight.errors import ConfigError, DeadlineError, EndpointError
from inflight.http.client import HttpEndpoint
from inflight.wire import GenerateRequest, SamplingParams
from tests.engines.fake_engines import ENGINE_TOKEN, FAILING, SILENT, FakeKind, installed
from tests.gates import SOON_S, wait_until
from tests.run.runs import RunProcess, ends_within, is_alive
from tests.servers import TOKEN

NOTHING = EngineOptions(model=Path("model"))

FAMILY = """
import os, pathlib, signal, subprocess, sys, time
me = pathlib.Path(sys.argv[2])
child = "import os, pathlib, signal, sys, time; IGNORE pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); {}"
child = child.format("time.sleep(600)")
# One more in a session of its own, whose parent is gone: neither a group nor a parent leads to it.
orphan = [sys.executable, "-c", child, f"{me}-orphan"]
parent = f"import subprocess; subprocess.Popen({orphan!r}, start_new_session=True)"
subprocess.run([sys.executable, "-c", parent])
subprocess.Popen([sys.executable, "-c", child, f"{me}-child"])
IGNORE
while not (pathlib.Path(f"{me}-orphan").exists() and pathlib.Path(f"{me}-child").exists()):
    time.sleep(0.01)
me.write_text(str(os.getpid()))
END
"""
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN);"


@pytest.fixture(autouse=True)
def _logs_of_failures_go_with_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def family(end: str, ignore: str = "pass;") -> FakeKind:
    """An engine with a child and an orphaned grandchild, which write their process ids to files."""
    return FakeKind("family", FAMILY.replace("IGNORE", ignore).replace("END", end))


def pids(path: Path) -> list[int]:
    """The process ids of a family, once all of it is there."""
    files = [path, Path(f"{path}-child"), Path(f"{path}-orphan")]
    deadline = time.monotonic() + 30
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [int(file.read_text()) for file in files]


# ---------------------------------------------------------------------------------------------------------------
# What is said


def test_an_engine_that_ends_is_quoted_with_its_status() -> None:
    words = r"(?s)failing ended with status 3.*the engine knows no such model"
    with pytest.raises(EndpointError, match=words), started(FAILING, NOTHING):
        pass


def test_no_more_than_the_last_lines_are_quoted_and_all_are_kept() -> None:
    many = FakeKind(
        "many", "import os, signal\nfor i in range(100): print('line', i, flush=True)\nos.kill(os.getpid(), 9)"
    )
    with pytest.raises(EndpointError, match=r"many was killed by signal 9") as raised, started(many, NOTHING):
        pass
    quoted = raised.value.message.splitlines()
    assert [line.strip() for line in quoted[1:]] == [f"line {i}" for i in range(80, 100)]
    log = Path(quoted[0].partition("the end of ")[2].removesuffix(":"))
    assert len(log.read_text().splitlines()) == 100


class Slow:
    """A healthy engine and its client, whose first ``num_unanswered`` calls get no answer."""

    def __init__(self, num_unanswered: int) -> None:
        self.num_unanswered = num_unanswered
        self.calls: list[str] = []

    async def wait_until_healthy(self, timeout_s: float, on_wait: Callable[[float], None]) -> None:
        assert timeout_s > 0
        self.calls.append("healthy")

    async def capabilities(self) -> None:
        self.calls.append("capabilities")
        await asyncio.sleep(0.01)
        if self.calls.count("capabilities") <= self.num_unanswered:
            raise DeadlineError("GET /server_info received no answer within 30 s")


def test_an_engine_that_answers_late_is_asked_again_until_the_start_timeout() -> None:
    slow: Any = Slow(2)
    asyncio.run(until_described(slow, slow, 60.0, lambda seconds: None))
    assert slow.calls == ["healthy", "capabilities"] * 3
    silent: Any = Slow(1_000_000)
    with pytest.raises(DeadlineError, match="no answer within 30 s"):
        asyncio.run(until_described(silent, silent, 0.1, lambda seconds: None))


def test_an_engine_that_is_never_healthy_is_stopped_at_the_deadline(tmp_path: Path) -> None:
    waited: list[float] = []
    log = tmp_path / "log"
    engine = start_engine(SILENT, NOTHING, log=log)
    words = r"(?s)silent was not healthy after 1 s and is being stopped.*loading for ever"
    wait_until(lambda: "loading for ever" in log.read_text())
    with pytest.raises(EndpointError, match=words), engine:
        asyncio.run(engine.wait_until_healthy(1.0, waited.append))
    assert waited == []  # it is told every five seconds


def test_what_cannot_be_started_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere/python' does not exist; pass the one of the environment"):
        start_engine(SILENT, NOTHING, python=str(tmp_path / "nowhere" / "python"))
    (tmp_path / "text").write_text("")
    with pytest.raises(ConfigError, match="text' is not executable"):
        start_engine(SILENT, NOTHING, python=str(tmp_path / "text"))
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        start_engine(SILENT, NOTHING, log=tmp_path / "nowhere" / "log")
    with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:70000"):
        start_engine(SILENT, NOTHING, port=70000)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: .* choose another port"):
            start_engine(SILENT, NOTHING, port=port)


@pytest.mark.skipif(not launch._ASSIGNED_PORTS.exists(), reason="no range of ports")
def test_no_outgoing_connection_can_take_the_port_of_an_engine_that_is_starting() -> None:
    assigned = int(launch._ASSIGNED_PORTS.read_text().split()[0])
    for _ in range(3):
        with start_engine(SILENT, NOTHING) as engine:
            assert 1024 <= int(engine.url.rpartition(":")[2]) < assigned


def test_an_engine_gets_its_own_variables_and_not_our_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_TOKEN", TOKEN)
    program = "import os; print(os.environ['OF_THE_KIND'], os.environ.get('INFLIGHT_TOKEN'))"
    log = tmp_path / "log"
    engine = start_engine(FakeKind("printing", program), NOTHING, log=log)
    with engine, pytest.raises(EndpointError, match="ended with status 0"):
        asyncio.run(engine.watch())
    assert log.read_text() == "yes None\n"


# ---------------------------------------------------------------------------------------------------------------
# Nothing stays behind


def test_an_engine_that_ignores_sigterm_is_killed_with_its_descendants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_PATIENCE_S", 1.0)
    options = EngineOptions(model=Path("model"), arguments=(str(tmp_path / "pid"),))
    with start_engine(family("time.sleep(600)", DEAF), options) as engine:
        members = pids(tmp_path / "pid")
        assert all(map(is_alive, members))
        stopped_at = time.monotonic()
    assert 1.0 <= time.monotonic() - stopped_at < SOON_S
    assert not any(map(is_alive, members))
    assert not engine.log.exists()  # nothing failed


def test_descendants_of_an_engine_that_ended_are_ended_too(tmp_path: Path) -> None:
    options = EngineOptions(model=Path("model"), arguments=(str(tmp_path / "pid"),))
    with start_engine(family("sys.exit(7)"), options, log=tmp_path / "log") as engine:
        members = pids(tmp_path / "pid")
        with pytest.raises(EndpointError, match="ended with status 7"):
            asyncio.run(engine.watch())
        assert not any(map(is_alive, members))


SHARING = """
import mmap, multiprocessing.resource_tracker, os, pathlib, sys, time
semaphore = multiprocessing.get_context("spawn").Semaphore()
os.kill(multiprocessing.resource_tracker._resource_tracker._pid, 9)  # as its supervisor may kill it
loads = pathlib.Path(f"/dev/shm/sglang_loads_{os.getpid()}.shm")
loads.write_bytes(bytes(4096))
of_another = pathlib.Path(sys.argv[2])
maps = [mmap.mmap(os.open(path, os.O_RDWR), 4096) for path in (loads, of_another)]
pathlib.Path(sys.argv[3]).write_text(f"{os.getpid()} {loads} /dev/shm/{semaphore._semlock.name.strip('/')}"
    .replace("/dev/shm/mp-", "/dev/shm/sem.mp-"))
time.sleep(600)
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_what_a_killed_engine_leaves_in_shared_memory_is_removed_and_nothing_else(tmp_path: Path) -> None:
    in_use, alike = (Path(f"/dev/shm/sglang_loads_test-{os.getpid()}-{name}.shm") for name in ("in-use", "alike"))
    ready = tmp_path / "ready"
    try:
        in_use.write_bytes(bytes(4096))
        alike.write_bytes(bytes(4096))
        options = EngineOptions(model=Path("model"), arguments=(str(in_use), str(ready)))
        with in_use.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
            engine = start_engine(FakeKind("sharing", SHARING), options)
            wait_until(lambda: ready.exists() and bool(ready.read_text()))
            pid, *left = ready.read_text().split()
            assert all(Path(path).exists() for path in left)
            engine.stop(at_once=True)
            assert not is_alive(int(pid))
            assert [path for path in left if Path(path).exists()] == []
            assert in_use.exists()
            assert alike.exists()
    finally:
        in_use.unlink(missing_ok=True)
        alike.unlink(missing_ok=True)


HEADLESS = """
import ctypes, os, pathlib, platform, socket, subprocess, sys, threading, time
path = pathlib.Path(sys.argv[2])
if len(sys.argv) == 3:
    subprocess.Popen([sys.executable, sys.argv[0], "0", str(path), "child"])
    time.sleep(600)
listener = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=time.sleep, args=(600,)).start()
own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
path.write_text(f"{os.getpid()} {own.pid} {listener.getsockname()[1]}")
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # ends this thread alone
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="no /proc")
def test_a_process_whose_first_thread_has_ended_is_ended_with_its_children_before_the_engine_counts_as_stopped(
    tmp_path: Path,
) -> None:
    program, ready = tmp_path / "headless.py", tmp_path / "ready"
    program.write_text(HEADLESS)
    starting = f"import runpy, sys; sys.argv[0] = {str(program)!r}; runpy.run_path({str(program)!r})"
    options = EngineOptions(model=Path("model"), arguments=(str(ready),))
    with start_engine(FakeKind("headless", starting), options):
        wait_until(lambda: ready.exists() and len(ready.read_text().split()) == 3)
        pid, own, port = map(int, ready.read_text().split())
        wait_until(lambda: not is_alive(pid))  # which is what its state says
        with socket.create_connection(("127.0.0.1", port)):
            pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert not Path(f"/proc/{pid}").exists()
    assert not is_alive(own)


LITTERING = """
import os, pathlib, socket, sys, tempfile, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(os.path.join(tempfile.gettempdir(), 36 * "s"))  # as long as vLLM's
print(os.environ["TORCHINDUCTOR_CACHE_DIR"], flush=True)
pathlib.Path(sys.argv[2]).touch()
time.sleep(600)
"""


def test_temporary_files_of_an_engine_are_removed_however_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t-") as short:
        monkeypatch.setenv("TMPDIR", short)
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # which torch sets once it has compiled something
        for at_once in (True, False):
            ready, log = tmp_path / f"ready-{at_once}", tmp_path / f"log-{at_once}"
            options = EngineOptions(model=Path("model"), arguments=(str(ready),))
            engine = start_engine(FakeKind("littering", LITTERING), options, log=log)
            wait_until(ready.exists)
            assert len(list(Path(short).iterdir())) == 1
            engine.stop(at_once=at_once)
            assert list(Path(short).iterdir()) == []
            assert Path(log.read_text().strip()).parent == Path(short)  # torch's cache is for later engines, too


def test_an_engine_ends_when_the_process_that_stands_between_is_killed(tmp_path: Path) -> None:
    options = EngineOptions(model=Path("model"), arguments=(str(tmp_path / "pid"),))
    with start_engine(family("time.sleep(600)"), options, log=tmp_path / "log") as engine:
        leader, *rest = pids(tmp_path / "pid")
        between = int(Path(f"/proc/{leader}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(between, signal.SIGKILL)
        with pytest.raises(EndpointError, match="was killed by signal 9"):
            asyncio.run(engine.watch())
        assert ends_within(leader)
    for pid in filter(is_alive, rest):  # nobody is left who knows of them
        os.kill(pid, signal.SIGKILL)


# ---------------------------------------------------------------------------------------------------------------
# Engines of which a part dies

SICK = """
import http.server, pathlib, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if pathlib.Path(sys.argv[2]).exists() else 200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_an_engine_whose_own_server_says_that_it_is_dead_is_reported(tmp_path: Path) -> None:
    options = EngineOptions(model=Path("model"), arguments=(str(tmp_path / "dead"),))

    async def watch(engine: EngineProcess) -> None:
        await engine.wait_until_healthy(SOON_S)
        watching = asyncio.ensure_future(engine.watch())
        await asyncio.wait({watching}, timeout=1.0)
        assert not watching.done()
        (tmp_path / "dead").touch()
        with pytest.raises(EndpointError, match="sick has died: GET /health answered status 503; the end of"):
            await watching

    with started(FakeKind("sick", SICK, liveness_path="/health"), options) as engine:
        asyncio.run(watch(engine))


# ---------------------------------------------------------------------------------------------------------------
# inflight serve --engine


class Serving:
    """``inflight serve --engine`` as a real process."""

    def __init__(self, directory: Path, model: Path, engine: str, *arguments: str) -> None:
        self.ready_file, self.log = directory / "ready.json", directory / "log"
        path = installed(directory / "installed")
        command = [sys.executable, "-m", "inflight", "serve", str(model), "--port", "0", "--engine", engine]
        command += ["--ready-file", str(self.ready_file), "--exit-with-stdin", *arguments]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path, "INFLIGHT_TOKEN": TOKEN},
                start_new_session=True,
                # A shell's background jobs ignore SIGINT, and so would this.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )

    def url(self) -> str:
        deadline = time.monotonic() + 90
        while not self.ready_file.exists():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)
        return str(json.loads(self.ready_file.read_text())["url"])

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def descendants(self) -> list[int]:
        """The process that stands between, and the engine."""
        found, rest = [], [self.process.pid]
        while rest:
            pid = rest.pop()
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            found += map(int, children)
            rest += map(int, children)
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        assert self.process.stdin is not None
        self.process.stdin.close()


@pytest.fixture
def start(tmp_path: Path, model_dir: Path) -> Iterator[Callable[..., Serving]]:
    servers: list[Serving] = []

    def start(engine: str, *arguments: str) -> Serving:
        directory = tmp_path / f"serving-{len(servers)}"
        directory.mkdir()
        servers.append(Serving(directory, model_dir, engine, *arguments))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_the_contract_is_served_in_front_of_an_engine_until_told_to_stop(
    start: Callable[..., Serving], model_dir: Path, tmp_path: Path
) -> None:
    server = start("fake", "--engine-arg=--max-concurrent=3", "--log", str(tmp_path / "engine.log"), "--name", "tiny")
    url = server.url()
    request = GenerateRequest(request_id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=3))

    async def use() -> None:
        endpoint = HttpEndpoint(url, token=TOKEN)
        can = await endpoint.capabilities()
        assert (can.model, can.max_concurrent_sequences) == ("tiny", 3)
        assert (await endpoint.generate(request)).completions[0].token_ids
        await endpoint.aclose()

    asyncio.run(use())
    # Its control routes take our token, not the engine's.
    for token, status in ((TOKEN, 400), (ENGINE_TOKEN, 401)):
        headers = {"authorization": f"Bearer {token}"}
        answer = httpx.post(f"{url}/init_process_group", json={}, headers=headers, timeout=10, trust_env=False)
        assert answer.status_code == status, answer.text
    family = server.descendants()
    assert len(family) == 2
    server.process.terminate()
    assert server.process.wait(SOON_S) == 128 + signal.SIGTERM
    assert not any(map(is_alive, family))
    output = server.output()
    assert f"serving tiny at {url} (fake at http://127.0.0.1:" in output
    assert "Traceback" not in output
    assert "serving tiny" in (tmp_path / "engine.log").read_text()


@pytest.mark.exhaustive
def test_an_engine_ends_with_the_killed_server_in_front_of_it(start: Callable[..., Serving]) -> None:
    server = start("fake")
    server.url()
    family = server.descendants()
    server.process.kill()
    assert all(ends_within(pid, 12.0) for pid in family)


@pytest.mark.exhaustive
def test_an_engine_that_dies_while_it_is_served_ends_the_server_with_its_last_words(
    start: Callable[..., Serving],
) -> None:
    server = start("fake")
    server.url()
    *_, engine = server.descendants()
    os.kill(engine, signal.SIGKILL)
    assert server.process.wait(SOON_S) == 1
    assert "inflight: fake was killed by signal 9; the end of " in server.output()
    assert "Traceback" not in server.output()


def test_a_part_of_an_engine_that_dies_ends_the_server_and_all_that_waits_for_it(
    start: Callable[..., Serving],
) -> None:
    server = start("parted")
    url = server.url()
    family = server.descendants()
    _, first, part, further = family
    os.kill(further, signal.SIGKILL)  # a pool of compilers may come and go
    request = GenerateRequest(
        request_id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=1000, ignore_eos=True)
    )

    async def use() -> None:
        endpoint = HttpEndpoint(url, token=TOKEN)
        await asyncio.sleep(1.0)
        assert (await endpoint.weight_version()).version == 0
        os.kill(first, signal.SIGSTOP)  # its sockets are open, and no answer comes
        calls = [asyncio.ensure_future(call) for call in (endpoint.generate(request), endpoint.weight_version())]
        await asyncio.wait(calls, timeout=2.0)
        os.kill(part, signal.SIGKILL)
        for call in calls:
            with pytest.raises(
                EndpointError, match=rf"parted has died: its process {part} \(.*\) was killed by SIGKILL"
            ):
                await call
        await endpoint.aclose()

    asyncio.run(use())
    assert server.process.wait(SOON_S) == 1
    assert re.search(rf"(?m)^inflight: parted has died: its process {part} .*; the end of ", server.output())
    assert "Traceback" not in server.output()
    assert not any(map(is_alive, family))


def test_a_start_ends_with_standard_input_and_with_signals(start: Callable[..., Serving]) -> None:
    servers = {"stdin": start("silent"), "sigint": start("silent"), "sigterm": start("silent")}
    families = {}
    for name, server in servers.items():
        deadline = time.monotonic() + 30
        while len(families.get(name, ())) < 2:
            assert time.monotonic() < deadline, server.output()
            time.sleep(0.05)
            families[name] = server.descendants()
    time.sleep(0.5)  # until it waits
    assert servers["stdin"].process.stdin is not None
    servers["stdin"].process.stdin.close()
    servers["sigint"].process.send_signal(signal.SIGINT)
    servers["sigterm"].process.terminate()
    statuses = {name: server.process.wait(SOON_S) for name, server in servers.items()}
    assert statuses == {"stdin": 0, "sigint": 130, "sigterm": 143}
    for name, family in families.items():
        assert not any(map(is_alive, family)), name
        assert "Traceback" not in servers[name].output()


def test_an_engine_that_fails_to_start_ends_the_server_with_status_1(start: Callable[..., Serving]) -> None:
    server = start("failing")
    assert server.process.wait(30) == 1
    assert "inflight: failing ended with status 3; the end of " in server.output()
    assert "the engine knows no such model" in server.output()
    assert "Traceback" not in server.output()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engine", "toaster"], "unknown engine 'toaster'; known: dynamo, embedded"),
        (
            ["--engine", "embedded", "--python", "python"],
            "but embedded runs in this one",
        ),
        (["--engine", "vllm", "--start-timeout", "0"], "--start-timeout must be above 0"),
        (["--engine", "vllm", "--threads", "0"], "--threads must be at least 1"),
        (["--engine", "vllm", "--python", "no/such/python"], "Python interpreter 'no/such/python' does not exist"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(
    capsys: pytest.CaptureFixture[str], model_dir: Path, arguments: list[str], words: str
) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["serve", str(model_dir), "--port", "0", *arguments]) == 1
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert words in capsys.readouterr().err


def test_a_missing_model_directory_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["serve", str(tmp_path / "nowhere"), "--engine", "vllm", "--port", "0"]) == 1
    assert "nowhere' does not exist, or has no config.json" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------
# A run that starts engines


@pytest.mark.timeout(300)
def test_a_run_trains_over_an_engine_and_an_embedded_server_and_ends_both(model_dir: Path, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": installed(tmp_path / "installed")}
    fleet = '[{ engine = "fake", engine_arguments = ["--max-concurrent", "8"] }, { engine = "embedded" }]'
    run = RunProcess(
        tmp_path, model_dir, "--servers.fleet", fleet, "--run.num_steps", "100000", environment=environment
    )
    try:
        run.wait_for_steps(3)
        run.wait_until(lambda: len({event["endpoint"] for event in run.events("group")}) == 2)
        run.interrupt()
        assert run.wait() == 130, run.output()
    finally:
        run.kill()
    assert len(run.rows()[-1]["publish"]["paused_s"]) == 2
    assert "serving" in (run.directory / "logs" / "server-0-fake.engine.log").read_text()
    assert all(map(ends_within, run.servers()))


@pytest.mark.timeout(300)
def test_a_run_whose_engine_does_not_start_says_what_the_engine_said(model_dir: Path, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": installed(tmp_path / "installed")}
    run = RunProcess(tmp_path, model_dir, "--servers.engine", "failing", environment=environment)
    assert run.wait(90) == 1
    assert "the engine knows no such model" in run.output()
    assert "Traceback" not in run.output()


@pytest.mark.timeout(300)
def test_a_run_whose_engine_starts_for_ever_names_the_log_of_the_engine(model_dir: Path, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": installed(tmp_path / "installed")}
    words = ("--servers.engine", "silent", "--run.start_timeout_s", "12")
    run = RunProcess(tmp_path, model_dir, *words, environment=environment)
    assert run.wait(90) == 1
    # On a busy machine, the run's limit passes before that of its server, and the error quotes the server's log.
    assert "did not answer within 12 s" in run.output() or "silent was not healthy after 10.8 s" in run.output()
    assert "server-0-silent.engine.log" in run.output()
    assert "Traceback" not in run.output()


def test_a_command_that_ends_before_its_supervisor_has_gone_on_is_noticed() -> None:
    program = f"""
import os, runpy, subprocess, sys

class Slow(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nothing has reaped it

subprocess.Popen = Slow
sys.argv = ["supervise.py", "1", sys.executable, "-c", "raise SystemExit(3)"]
runpy.run_path({supervise.__file__!r}, run_name="__main__")
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        try:
            assert process.wait(SOON_S) == 3
        finally:
            process.kill()
