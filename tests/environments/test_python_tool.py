"""The Python tool: what code gets, what it is refused, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight.environments.tools.python_tool import PythonResult, PythonTool, _visible_paths
from inflight.environments.tools.seccomp import seccomp_filter
from inflight.errors import ConfigError, TaskError
from tests.environments.attempts import ATTEMPTS, Attempt
from tests.environments.outside import Outside, outside
from tests.gates import SOON_S

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "tests.environments.tool_program"]

PROBE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
ok = libc.unshare(0x10020000) == 0 and libc.mount(b"none", b"/", None, ctypes.c_ulong(0x44000), None) == 0
sys.exit(0 if ok else os.strerror(ctypes.get_errno()))
"""


@pytest.fixture(scope="module")
def _namespaces() -> None:
    """Skip where the kernel refuses user namespaces, and only there: a sandbox that fails elsewhere is a failure."""
    probe = subprocess.run([sys.executable, "-I", "-c", PROBE], capture_output=True, text=True, timeout=60)
    if probe.returncode != 0:
        pytest.skip(f"this machine refuses user namespaces: {probe.stderr.strip()}")


namespaces = pytest.mark.usefixtures("_namespaces")


@pytest.fixture
def beyond() -> Iterator[Outside]:
    with outside() as made:
        yield made


def run(code: str, tool: PythonTool | None = None) -> PythonResult:
    return asyncio.run((tool or PythonTool()).run(code))


def wait_for_none(beyond: Outside, deadline_s: float = SOON_S) -> None:
    deadline = time.monotonic() + deadline_s
    while left := beyond.marked_processes():
        assert time.monotonic() < deadline, f"processes are left: {left}"
        time.sleep(0.05)


# ---------------------------------------------------------------------------------------------------------------
# Getting out


@namespaces
@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.name.replace(" ", "-"))
def test_what_tries_to_get_out_stays_in(attempt: Attempt, beyond: Outside) -> None:
    expected = attempt.status.split("|")
    if "timeout" in expected:
        beyond.mark = beyond.mark.replace(beyond.mark.split(".")[0], "0", 1)
    tool = PythonTool(timeout_s=float(beyond.mark))

    async def watched() -> PythonResult:
        running = asyncio.create_task(tool.run(beyond.header + attempt.code))
        while not running.done():
            beyond.measure()
            await asyncio.wait([running], timeout=0.02)
        return running.result()

    result = asyncio.run(watched())
    assert beyond.problems(result) == []
    assert any(part in result.text for part in attempt.says.split("|")), result
    assert result.status in expected, result
    assert len(result.text) <= tool.max_output_bytes + 200
    assert beyond.most_threads <= 36, "the launcher, process 1, the program and its 32 threads"
    assert beyond.most_memory_bytes <= tool.memory_bytes + tool.disk_bytes + 2 * 2**25


GETS_OUT = {
    "reads a file": "the secret was read",
    "overwrites a file": "files changed",
    "opens shared memory": "the secret was read",
    "reads the user list": "/etc/passwd was read",
    "connects to a loopback port": "the tcp socket was reached",
    "sends a datagram": "the udp socket was reached",
    "connects to a unix socket": "the unix socket was reached",
    "connects to an abstract socket": "the abstract socket was reached",
    "kills another process": "another process was ended",
    "signals the caller": "this process got the signals",
}


@pytest.mark.parametrize("name", GETS_OUT)
def test_what_gets_out_where_there_are_limits_only_is_seen(name: str, beyond: Outside) -> None:
    """The test above can fail: without namespaces the same programs do get out, and the same check reports it."""
    (attempt,) = (attempt for attempt in ATTEMPTS if attempt.name == name)
    result = run(beyond.header + attempt.code, PythonTool(isolation="limits", timeout_s=float(beyond.mark)))
    assert any(problem.startswith(GETS_OUT[name]) for problem in beyond.problems(result)), result


@namespaces
@pytest.mark.parametrize("user", ["the caller", "root of a namespace"])
def test_a_user_whom_the_machine_grants_nothing_has_the_same_sandbox(user: str, beyond: Outside) -> None:
    """As in a container without privileges: the caller is root inside a user namespace and nobody else."""
    root = [] if user == "the caller" else ["unshare", "--user", "--map-root-user"]
    code = f"{beyond.header}import os; print(os.getuid(), os.path.exists(FOLDER), os.listdir('/tmp'))\nos.fork()"
    result = run_program([*root, *PROGRAM, "namespaces", "20"], code)
    assert result["text"].startswith("1000 False ['main.py']\n"), result
    assert "PermissionError" in result["text"]


# ---------------------------------------------------------------------------------------------------------------
# Why it is not bubblewrap

MANY_FILES = "for i in range(5000): open(f'/tmp/{i}', 'w').close()\nprint('made')"
MANY_THREADS = """
import resource, threading, time
resource.setrlimit(resource.RLIMIT_NPROC, (34, 34))
for _ in range(100): threading.Thread(target=time.sleep, args=(0.5,), daemon=True).start()
print('made')
"""


def under_bubblewrap(code: str, *options: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run code under ``bwrap``, which make installs, with the same view of files; skip where no user may run it."""
    assert shutil.which("bwrap") is not None, "bubblewrap is not installed"
    head = ["bwrap", "--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--as-pid-1", "--clearenv"]
    if subprocess.run([*head, "--ro-bind", "/", "/", "true"], capture_output=True, timeout=60).returncode != 0:
        pytest.skip("bubblewrap does not run here")
    python = os.path.realpath(sys.executable)
    for path in (*_visible_paths(), python):
        head += ["--dev-bind" if path.startswith("/dev/") else "--ro-bind", path, path]
    head += ["--size", str(PythonTool().disk_bytes), "--tmpfs", "/tmp", *options, python, "-I", "-S", "-c", code]
    return subprocess.run(head, capture_output=True, text=True, timeout=120, **settings)


@namespaces
@pytest.mark.parametrize(
    ("code", "refusal"),
    [
        (MANY_FILES, "No space left on device"),
        pytest.param(
            MANY_THREADS,
            "can't start new thread",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="for other users bubblewrap holds it too"),
        ),
    ],
    ids=["files", "threads of a caller who is root"],
)
def test_bubblewrap_does_not_hold_what_the_sandbox_holds(code: str, refusal: str) -> None:
    """If this fails because bubblewrap holds it too, there is less reason for a sandbox of our own."""
    assert under_bubblewrap(code).stdout == "made\n"
    result = run(code, PythonTool(timeout_s=60))
    assert refusal in result.text
    assert "made" not in result.text


def test_bubblewrap_starts_no_program_under_a_filter_that_refuses_other_programs() -> None:
    """It installs the filter before it starts the program, so code must be confined by the process that runs it."""
    read_fd, written_fd = os.pipe()
    os.write(written_fd, seccomp_filter())
    os.close(written_fd)
    try:
        done = under_bubblewrap("print('ran')", "--seccomp", str(read_fd), pass_fds=(read_fd,))
    finally:
        os.close(read_fd)
    assert (done.stdout, done.returncode) == ("", 1)
    assert "Operation not permitted" in done.stderr


# ---------------------------------------------------------------------------------------------------------------
# What is left


@namespaces
@pytest.mark.parametrize("isolation", ["namespaces", "limits"])
def test_cancelling_at_any_moment_leaves_no_process_and_no_file_descriptor(isolation: str, beyond: Outside) -> None:
    tool = PythonTool(timeout_s=float(beyond.mark), isolation=isolation)  # type: ignore[arg-type]
    code = (
        "while True: pass"
        if isolation == "namespaces"
        else "import os\nif os.fork() == 0: os.setsid()\nwhile True: pass"
    )

    async def cancelled(delay_s: float) -> None:
        running = asyncio.create_task(tool.run(code))
        await asyncio.sleep(delay_s)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        # A start that is cancelled midway has been killed, and may take a moment to end.
        await asyncio.to_thread(wait_for_none, beyond)

    async def all_of_them() -> None:
        before = set(os.listdir("/proc/self/fd"))
        for step in range(16):
            await cancelled(0.004 * step)
        assert set(os.listdir("/proc/self/fd")) <= before  # threads of earlier tests may close some

    asyncio.run(all_of_them())


@namespaces
def test_code_ends_with_the_program_that_runs_it(beyond: Outside) -> None:
    code = "import time\nprint('x', flush=True)\nwhile True: time.sleep(1)"
    program = subprocess.Popen(
        [*PROGRAM, "namespaces", beyond.mark], stdin=subprocess.PIPE, cwd=ROOT, env=environment()
    )
    assert program.stdin is not None
    program.stdin.write(code.encode())
    program.stdin.close()
    deadline = time.monotonic() + 60
    while len(set(beyond.marked_processes()) - {program.pid}) < 3:
        assert time.monotonic() < deadline and program.poll() is None
        time.sleep(0.02)
    program.kill()
    program.wait()
    wait_for_none(beyond)


def test_a_daemon_under_limits_is_killed_with_the_code(beyond: Outside) -> None:
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\n    os._exit(0)"
    )
    result = run(code, PythonTool(isolation="limits", timeout_s=float(beyond.mark)))
    assert result.status == "ok"
    assert beyond.problems(result) == []


@namespaces
def test_runs_at_the_same_time_see_nothing_of_each_other() -> None:
    code = "import os, time; open('{0}', 'w').close(); time.sleep(0.3); print(sorted(os.listdir()), os.getpid())"

    async def all_of_them() -> list[PythonResult]:
        tool = PythonTool(timeout_s=60)
        return await asyncio.gather(*(tool.run(code.format(index)) for index in range(8)))

    assert [result.text for result in asyncio.run(all_of_them())] == [f"['{i}', 'main.py'] 2\n" for i in range(8)]


@namespaces
def test_a_run_leaves_no_file_for_the_next() -> None:
    for _ in range(2):
        assert run("import os; print(os.listdir()); open('left', 'w').close()").text == "['main.py']\n"


# ---------------------------------------------------------------------------------------------------------------
# What is missing is said


def run_program(command: list[str], code: str) -> dict[str, str]:
    done = subprocess.run(
        command, input=code, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment(), check=True
    )
    return dict(json.loads(done.stdout))


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


@namespaces
def test_a_machine_without_user_namespaces_is_refused_and_told_what_to_do() -> None:
    nothing = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", nothing, "sh", *PROGRAM]
    result = run_program([*command, "namespaces", "5"], "open('/tmp/ran', 'w')")
    assert result["error"] == "UnsupportedError"
    assert "clone into new namespaces: No space left on device" in result["message"]
    for part in ("sysctl user.max_user_namespaces", "isolation='limits'"):
        assert part in result["message"]
    assert run_program([*command, "limits", "5"], "print(1)")["status"] == "ok"


@namespaces
def test_a_machine_without_other_namespaces_is_refused() -> None:
    nothing = 'echo 0 > /proc/sys/user/max_net_namespaces; exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", nothing, "sh", *PROGRAM]
    assert run_program([*command, "namespaces", "5"], "print(1)")["error"] == "UnsupportedError"


def test_a_start_that_fails_is_an_error_and_not_a_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(TaskError, match=r"cannot be started: .*No such file"):
        run("print(1)", PythonTool(isolation="limits"))
    shutil.copy("/bin/false", tmp_path / "python")
    with pytest.raises(TaskError, match="ended before the code ran"):
        run("print(1)", PythonTool(isolation="limits"))


@pytest.mark.parametrize(
    "setting",
    [{"timeout_s": 0}, {"timeout_s": float("inf")}, {"memory_bytes": 1000}, {"max_output_bytes": 0},
     {"disk_bytes": -1}, {"isolation": "none"}],
)  # fmt: skip
def test_limits_that_cannot_be_are_refused(setting: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(setting))} is "):
        PythonTool(**setting)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------
# What code gets


THIRTY_ONE_THREADS = """
import threading
barrier = threading.Barrier(32)
threads = [threading.Thread(target=barrier.wait) for _ in range(31)]
for thread in threads: thread.start()
barrier.wait()
print(len(threads))
"""


@namespaces
@pytest.mark.parametrize("isolation", ["namespaces", "limits"])
@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("print(sum(range(10)))", "ok", "45\n"),
        ("x = 1", "ok", "[no output]"),
        ("import sys; print('é'); print('b', file=sys.stderr); print('c', end='')", "ok", "é\nb\nc"),
        ("print(1)\nexit()\nprint(2)", "ok", "1\n"),
        ("import sys; sys.exit(3)", "error", "[exit status 3]"),
        ("if __name__ == '__main__': print(open(__file__).read()[:4])", "ok", "if _\n"),
        ("import threading; threading.Thread(target=lambda: print('from a thread')).start()", "ok", "from a thread\n"),
        (THIRTY_ONE_THREADS, "ok", "31\n"),
        ("import atexit; atexit.register(print, 'at exit')", "ok", "at exit\n"),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nprint(A(1))", "ok", "A(x=1)\n"),
        ("import sqlite3, ssl, zlib, decimal, hashlib, json, asyncio; print('all')", "ok", "all\n"),
        ("import tempfile; f = tempfile.TemporaryFile(); f.write(b'x'); f.seek(0); print(f.read())", "ok", "b'x'\n"),
        ("import asyncio; asyncio.run(asyncio.sleep(0, print('async')))", "ok", "async\n"),
        ("import os; print(len(os.urandom(4)), len(open('/dev/urandom', 'rb').read(4)))", "ok", "4 4\n"),
    ],
)  # fmt: skip
def test_code_runs_as_a_program_of_its_own(isolation: str, code: str, status: str, text: str) -> None:
    result = run(code, PythonTool(isolation=isolation, timeout_s=60))  # type: ignore[arg-type]
    assert (result.status, result.text) == (status, text)
    assert (result.exit_code == 0) == (status == "ok")


@namespaces
def test_an_error_shows_the_lines_of_the_code_and_nothing_of_the_sandbox() -> None:
    assert run("def f():\n    return 1 / 0\n\nf()").text == (
        'Traceback (most recent call last):\n  File "/tmp/main.py", line 4, in <module>\n    f()\n'
        '  File "/tmp/main.py", line 2, in f\n    return 1 / 0\n           ~~^~~\n'
        "ZeroDivisionError: division by zero\n[exit status 1]"
    )
    assert run("x = (").text.startswith('  File "/tmp/main.py", line 1\n')


@namespaces
def test_long_output_keeps_its_beginning_and_its_end() -> None:
    result = run("for i in range(100): print(i)", PythonTool(max_output_bytes=20))
    assert result.text == "0\n1\n2\n3\n4\n\n[270 bytes cut]\n\n97\n98\n99\n"
    assert run("print('x' * 19)", PythonTool(max_output_bytes=20)).text == "x" * 19 + "\n"


def test_the_definition_is_a_tool_of_the_chat_api() -> None:
    tool = PythonTool(timeout_s=2.5)
    definition = tool.definition()
    assert definition["type"] == "function"
    assert definition["function"]["name"] == tool.name == "python"
    assert definition["function"]["parameters"]["required"] == ["code"]
    assert definition["function"]["parameters"]["properties"]["code"]["type"] == "string"
    assert "2.5 s, 256 MiB of memory" in definition["function"]["description"]
    assert json.loads(json.dumps(definition)) == definition


def test_what_is_no_text_is_an_error_for_the_model() -> None:
    result = asyncio.run(PythonTool().run(None))
    assert result.status == "error"
    assert "NoneType" in result.text
