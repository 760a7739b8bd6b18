"""Harbor's task folders: what is refused, what the agent and the verifier can reach, and that nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import json
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from inflight.base.tasks import cancel_and_wait, start
from inflight.environments.adapters import harbor_sandboxes
from inflight.environments.adapters.harbor import HarborEnvironment
from inflight.environments.adapters.harbor_tasks import read_task, read_tasks
from inflight.environments.play_loop import PlayLoop
from inflight.environments.playing import play
from inflight.environments.recording import PlayedEpisode
from inflight.errors import ConfigError, TaskError
from inflight.rollouts import load_task
from tests.environments.scripted import play_scripted, scripted_episode, text_of
from tests.gates import SOON_S
from tests.run.runs import RunProcess
from tests.zygote import python

ROOT = Path(__file__).parents[2]
FIVE = ROOT / "examples" / "harbor"
DONE = "echo 1 > /logs/verifier/reward.txt\n"
IF_OUT = "if [ -e out.txt ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"


@pytest.fixture(scope="module")
def _bubblewrap() -> None:
    """Skip where no user may run bubblewrap, and only there."""
    assert shutil.which("bwrap") is not None, "bubblewrap is not installed"
    probe = ["bwrap", "--unshare-all", "--unshare-user", "--ro-bind", "/", "/", "true"]
    if subprocess.run(probe, capture_output=True, timeout=60).returncode != 0:
        pytest.skip("bubblewrap does not run here")


bubblewrap = pytest.mark.usefixtures("_bubblewrap")


@pytest.fixture
def shelf() -> Iterator[Path]:
    """Yield an empty folder, in which episodes make theirs; any user may enter it, as those who run commands must."""
    folder = Path(tempfile.mkdtemp(prefix="harbor-shelf-", dir="/tmp"))
    folder.chmod(0o755)
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    yield folder
    tempfile.tempdir = before
    shutil.rmtree(folder)


def write_task(folder: Path, test: str = DONE, toml: str = "", **files: str) -> Path:
    """Write a task; of ``files``, two underscores in a name are a slash, and one is a dot."""
    contents = {"task.toml": toml, "instruction.md": "Do it.\n", "tests/test.sh": test}
    contents |= {name.replace("__", "/").replace("_", "."): text for name, text in files.items()}
    for name, text in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def call(command: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"


def work(folder: Path, *commands: Any, **settings: Any) -> PlayedEpisode:
    """Play an episode of a task in which the model calls these commands, one per turn."""
    turns = iter([*map(call, commands), "Done."])
    environment = HarborEnvironment(0, str(folder), **settings)
    return play_scripted(environment, 0, lambda prompt: next(turns), timeout_s=SOON_S)


def results(played: PlayedEpisode) -> list[str]:
    """Return what the commands printed, as the model reads it."""
    assert played.failure is None, played.failure
    found = re.findall(r"<tool_response>\n(.*?)</tool_response>", text_of(played, -1), re.DOTALL)
    return [text.rstrip("\n") for text in found]


def marked_processes(mark: str) -> list[str]:
    """Return the command lines of this machine's processes that contain a text."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and mark.encode() in (entry / "cmdline").read_bytes():
                found.append((entry / "cmdline").read_text(errors="replace"))
    return found


# ---------------------------------------------------------------------------------------------------------------
# Folders


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[agent]\ntimeout_sec = 'long'", "agent.timeout_sec"),
        ("[agent]\ntimeout_sec = -1", "agent.timeout_sec"),
        ("[environment]\nmemory_mb = 1", "environment.memory_mb"),
        ("[environment]\ndocker_image = '--privileged'", "environment.docker_image"),
        ("[verifier.env]\n'A B' = 'x'", "verifier.env"),
        ("[verifier]\ntimeout_secs = 1", "timeout_secs"),
        ("[[steps]]\nname = 'first'", "steps"),
        ("[agent", "is not valid TOML"),
    ],
)
def test_an_error_in_task_toml_names_the_file_and_the_key(tmp_path: Path, toml: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        read_task(write_task(tmp_path, toml=toml))
    assert str(tmp_path / "task.toml") in str(caught.value)


def test_every_reason_against_a_task_is_listed_at_once(tmp_path: Path) -> None:
    toml = """
        [environment]
        gpus = 1
        allow_internet = true
        mcp_servers = [{ name = "x" }]
        healthcheck = { command = "true" }
        env = { KEY = "${KEY}" }
        [verifier]
        environment_mode = "separate"
        collect = [{ path = "x" }]
        environment = { docker_image = "x" }
    """
    dockerfile = "FROM debian:12\nRUN apt-get install -y jq\nWORKDIR /usr/src\nCOPY a.txt /etc/a.txt\n"
    write_task(tmp_path, toml=toml, environment__Dockerfile=dockerfile, **{"environment__docker-compose_yaml": ""})
    (tmp_path / "instruction.md").unlink()
    (tmp_path / "tests" / "test.sh").unlink()
    with pytest.raises(ConfigError) as caught:
        read_task(tmp_path)
    for words in (
        "environment.gpus is 1",
        "environment.allow_internet is True",
        "MCP servers are not started",
        "environment.healthcheck is {",
        "environment.env.KEY is '${KEY}'",
        "verifier.environment_mode is 'separate'",
        "verifier.collect is [",
        "verifier.environment is {",
        "environment/docker-compose.yaml",
        "'RUN apt-get install -y jq' is not supported",
        "/usr/src belongs to the sandbox",
        "COPY to /etc/a.txt, which is outside /usr/src",
        "COPY of a.txt, which does not exist below environment/",
        "instruction.md is missing",
        "tests/test.sh is missing",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    "line", ["COPY --chown=1 a.txt .", "COPY *.txt .", "COPY $A .", 'COPY ["a.txt", "."]', "ENV A=1", "FROM other"]
)
def test_what_a_dockerfile_may_not_contain(tmp_path: Path, line: str) -> None:
    write_task(tmp_path, environment__Dockerfile=f"FROM debian\nWORKDIR /app\n{line}\n", environment__a_txt="a")
    with pytest.raises(ConfigError, match="is not supported: Dockerfiles are not built"):
        read_task(tmp_path)


def test_a_file_from_outside_of_the_environment_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    write_task(tmp_path / "task", environment__Dockerfile="FROM debian\nWORKDIR /app\nCOPY ../../secret .\n")
    with pytest.raises(ConfigError, match="does not exist below environment/"):
        read_task(tmp_path / "task")


def test_a_folder_of_tasks_is_refused_with_the_reasons_of_each(tmp_path: Path) -> None:
    write_task(tmp_path / "a", toml="[environment]\ngpus = 2")
    write_task(tmp_path / "b", toml="[metadata]\nanything = { goes = 1979-05-27 }")
    write_task(tmp_path / "c", toml="[environment]\nallow_internet = true")
    with pytest.raises(
        ConfigError, match=r"2 of 3 Harbor tasks cannot be run:\n.*/a: .*gpus is 2.*\n.*/c: .*allow_internet"
    ):
        read_tasks(tmp_path)
    with pytest.raises(TaskError, match="2 of 3 Harbor tasks"):
        load_task("inflight.environments.adapters.harbor:HarborEnvironment", {"tasks": str(tmp_path)}, 0)
    with pytest.raises(ConfigError, match="contains no Harbor task"):
        read_tasks(tmp_path / "a" / "tests")
    with pytest.raises(ConfigError, match="nothing does not exist"):
        read_tasks(tmp_path / "nothing")


def test_what_the_machine_lacks_is_listed_with_the_other_reasons(
    tmp_path: Path, stand_in: Callable[..., Callable[[], list[list[str]]]]
) -> None:
    stand_in()
    write_task(tmp_path / "a", toml="[environment]\ndocker_image = 'absent'\ngpus = 2")
    write_task(tmp_path / "b", toml="[environment]\ndocker_image = 'absent'")
    with pytest.raises(ConfigError, match="2 of 2") as caught:
        HarborEnvironment(0, str(tmp_path))
    lines = [line.removeprefix(f"{tmp_path}/") for line in str(caught.value).splitlines()[1:]]
    assert [line.partition(" is ")[0] for line in lines if "gpus" in line] == ["a: environment.gpus"]
    assert [line.partition(":")[0] for line in lines if "the image 'absent'" in line] == ["a", "b"]


def test_tasks_come_by_name_and_again_after_the_last() -> None:
    environment = HarborEnvironment(0, str(FIVE))
    names = [environment.item(i).metadata["task"].folder.name for i in range(6)]
    assert names == ["count-lines", "rename-file", "sort-lines", "sum-numbers", "write-word", "count-lines"]
    assert environment.item(4).prompt == "Write the word lamp to out.txt."


# ---------------------------------------------------------------------------------------------------------------
# What the agent finds and reaches


@bubblewrap
@pytest.mark.parametrize("name", sorted(task.name for task in FIVE.iterdir()))
def test_the_solution_of_an_example_has_reward_1_and_doing_nothing_0(name: str) -> None:
    solution = (FIVE / name / "solution" / "solve.sh").read_text()
    assert work(FIVE / name, solution).reward == 1.0
    assert work(FIVE / name).reward == 0.0


@bubblewrap
def test_files_last_and_variables_and_directories_of_the_shell_do_not(tmp_path: Path) -> None:
    write_task(tmp_path, IF_OUT, environment__data__in_txt="in")
    commands = (
        "cat data/in.txt; A=1; cd /tmp; touch here ~/there",
        "echo $A $PWD; ls /tmp ~",
        "false",
        "touch out.txt",
    )
    played = work(tmp_path, *commands)
    assert results(played) == ["in", "/app\n/root:\nthere\n\n/tmp:\nhere", "[exit status 1]", "[no output]"]
    assert played.reward == 1.0


@bubblewrap
def test_a_dockerfile_decides_where_files_are_copied(tmp_path: Path) -> None:
    dockerfile = "# a comment\nFROM debian:12\nWORKDIR /srv/work\nCOPY a.txt \\\n  b.txt ./\n"
    dockerfile += "COPY data /srv/work/d\nCOPY a.txt c\n"
    files = {
        "environment__a_txt": "a",
        "environment__b_txt": "b",
        "environment__data__x": "x",
        "environment__unused": "",
    }
    played = work(write_task(tmp_path, environment__Dockerfile=dockerfile, **files), "pwd; find . -type f | sort")
    assert results(played) == ["/srv/work\n./a.txt\n./b.txt\n./c\n./d/x"]
    write_task(tmp_path, environment__Dockerfile="FROM debian\nWORKDIR /app\n\nCOPY ./ /app\n", **files)
    found = "./a.txt\n./b.txt\n./data/x\n./unused"
    assert results(work(tmp_path, "find . -type f | sort")) == [found]


@bubblewrap
def test_the_agent_neither_sees_nor_forges_tests_and_rewards(tmp_path: Path) -> None:
    forge = (
        "ls /tests /logs; mkdir -p /tests /logs/verifier; echo 1 > /logs/verifier/reward.txt; touch /x /dev/x /usr/x"
    )
    played = work(write_task(tmp_path, "ls /app; echo 0 > /logs/verifier/reward.txt"), forge)
    (said,) = results(played)
    assert said.count("No such file or directory") == 3
    assert said.count("Read-only file system") == 5
    assert played.reward == 0.0


@bubblewrap
def test_the_agent_has_no_network_no_privileges_and_none_of_our_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFLIGHT_TOKEN", "secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        script = (
            f"(echo > /dev/tcp/127.0.0.1/{port}) 2>&1; env; unshare --user true 2>&1; grep CapEff /proc/self/status"
        )
        (said,) = results(work(write_task(tmp_path, toml="[environment.env]\nOWN = 'yes'"), script))
        assert not select.select([server], [], [], 0)[0]
    assert "connect: Network is unreachable" in said or "Connection refused" in said
    assert "secret" not in said
    assert "OWN=yes" in said
    assert "unshare failed" in said
    assert "CapEff:\t0000000000000000" in said


@bubblewrap
def test_the_verifiers_variables_and_home_are_not_the_agents(tmp_path: Path) -> None:
    test = 'env; ls ~; [ "$SECRET" = "7 8" ] && [ ! -e ~/planted ] && echo 1 > /logs/verifier/reward.txt'
    played = work(write_task(tmp_path, test, "[verifier.env]\nSECRET = '7 8'"), "env; touch ~/planted")
    assert "SECRET" not in results(played)[0]
    assert played.reward == 1.0


@bubblewrap
def test_no_process_of_a_command_survives_it(tmp_path: Path) -> None:
    test = "if flock -n lock true; then echo 1; else echo 0; fi > /logs/verifier/reward.txt"
    hold = (
        "setsid flock lock sh -c 'touch held; sleep 1000' > /dev/null 2>&1 & until [ -e held ]; do :; done; echo held"
    )
    played = work(write_task(tmp_path, test), hold, "flock -n lock echo free", hold)
    assert results(played) == ["held", "free", "held"]
    assert played.reward == 1.0


# ---------------------------------------------------------------------------------------------------------------
# Limits


@bubblewrap
def test_a_command_is_ended_at_its_time_limit_and_the_next_one_runs(tmp_path: Path) -> None:
    hang = "trap '' TERM; echo before; setsid sleep 1000 & sleep 1000"
    played = work(write_task(tmp_path), hang, "echo after", command_timeout_s=0.5)
    assert results(played) == ["before\n[ended after 0.5 s]", "after"]


@bubblewrap
def test_the_verifier_judges_what_the_agent_had_done_at_its_time_limit(tmp_path: Path) -> None:
    played = work(write_task(tmp_path, IF_OUT, "[agent]\ntimeout_sec = 1.0"), "touch out.txt; sleep 1000")
    assert (played.failure, played.reward, len(played.calls)) == (None, 1.0, 1)


@bubblewrap
def test_the_verifier_judges_after_the_last_turn(tmp_path: Path) -> None:
    played = work(write_task(tmp_path, IF_OUT), "true", "touch out.txt", "echo never", max_turns=3)
    assert (played.failure, played.reward, len(played.calls)) == (None, 1.0, 3)


@bubblewrap
def test_a_verifier_that_hangs_fails_the_episode(tmp_path: Path) -> None:
    played = work(write_task(tmp_path, "sleep 1000", "[verifier]\ntimeout_sec = 0.5"))
    assert "wrote neither reward.json nor reward.txt" in (played.failure or "")
    assert "[ended after 0.5 s]" in (played.failure or "")


@bubblewrap
def test_output_is_cut_and_a_flood_is_ended(tmp_path: Path) -> None:
    cut, flood = results(work(write_task(tmp_path), "seq 1000", "yes", max_output_bytes=100))
    assert cut.startswith("1\n2\n") and cut.endswith("999\n1000") and "bytes cut]" in cut
    assert len(cut) < 150
    assert flood.endswith("[ended: it wrote more than 10000 bytes]")


@bubblewrap
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("head -c 70M /dev/zero > file; stat -c %s file; rm file", "67108864"),
        ("x=$(head -c 300M /dev/zero | tr '\\0' x); echo ${#x}", "cannot allocate"),
        (
            "perl -e 'while (defined(my $pid = fork)) { sleep 1000 if !$pid; $n++ } print $n < 130 ? q(few) : q(many)'",
            "few",
        ),
        ("head -c 65M /dev/zero > /dev/shm/file || echo full", "full"),
    ],
    ids=["file", "memory", "processes", "shared memory"],
)
def test_resources_of_a_command_are_limited(tmp_path: Path, command: str, expected: str) -> None:
    (said,) = results(work(write_task(tmp_path, toml="[environment]\nmemory_mb = 256\nstorage_mb = 64"), command))
    assert expected in said


@bubblewrap
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("head -c 40M /dev/zero > a; head -c 40M /dev/zero > b", "take more than environment.storage_mb = 64"),
        ("mkdir many; cd many; seq 300 | xargs touch", "more than 200 files"),
        ("for i in $(seq 2000); do mkdir d && cd d || exit; done", "more than 64 nested"),
        ("head -c 40M /dev/zero > a; head -c 40M /dev/zero > b; sleep 1000", "take more than environment.storage_mb"),
    ],
    ids=["bytes", "files", "depth", "while it runs"],
)
def test_an_episode_whose_files_exceed_a_limit_fails_and_its_files_are_removed(
    tmp_path: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch, command: str, words: str
) -> None:
    monkeypatch.setattr("inflight.environments.adapters.harbor_sandboxes.MAX_FILES", 200)
    played = work(write_task(tmp_path, toml="[environment]\nstorage_mb = 64"), command, "echo never")
    assert words in (played.failure or "")
    assert list(shelf.iterdir()) == []


@bubblewrap
def test_the_model_reads_what_is_wrong_with_a_command(tmp_path: Path) -> None:
    played = work(write_task(tmp_path), 5, "a\0b")
    assert results(played) == ["{'error': 'the command must be a string without NUL of at most 100000 bytes'}"] * 2
    with pytest.raises(ValueError, match="at most 100000 bytes"):
        harbor_sandboxes._check_command("x" * 100_001)


# ---------------------------------------------------------------------------------------------------------------
# Rewards


@bubblewrap
@pytest.mark.parametrize(
    ("test", "reward"),
    [
        ("echo 0.25 > /logs/verifier/reward.txt; exit 3", 0.25),
        ('echo \'{"reward": 0.5, "speed": 2}\' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt', 0.5),
        ("echo '-1e-1' > /logs/verifier/reward.txt", -0.1),
    ],
)
def test_the_reward_is_what_the_verifier_wrote(tmp_path: Path, test: str, reward: float) -> None:
    assert work(write_task(tmp_path, test)).reward == reward


@bubblewrap
@pytest.mark.parametrize(
    ("test", "words"),
    [
        (
            "echo no; exit 1",
            "wrote neither reward.json nor reward.txt to /logs/verifier; the output of the tests ended with: no",
        ),
        ("echo nan > /logs/verifier/reward.txt", "is 'nan\\n', which is not a finite number"),
        ("echo much > /logs/verifier/reward.txt", "is not a finite number"),
        ("echo '{\"reward\": true}' > /logs/verifier/reward.json", "is not an object of finite numbers"),
        ('echo \'{"reward": 1, "other": NaN}\' > /logs/verifier/reward.json', "is not an object of finite numbers"),
        ("echo '{\"score\": 1}' > /logs/verifier/reward.json", 'with the key "reward"'),
        ("echo '[1]' > /logs/verifier/reward.json", "is not an object of finite numbers"),
        ("echo 1 > /app/forged; ln -s /app/forged /logs/verifier/reward.txt", "is not a regular file"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", "is not a regular file"),
        ("mkfifo /logs/verifier/reward.txt", "is not a regular file"),
        ("mkdir /logs/verifier/reward.json", "is not a regular file"),
        ("head -c 100000 /dev/zero > /logs/verifier/reward.txt", "has more than 65536 bytes"),
    ],
)
def test_a_reward_that_is_missing_or_invalid_fails_the_episode(tmp_path: Path, test: str, words: str) -> None:
    played = work(write_task(tmp_path, test))
    assert played.failure_kind == "raised"
    assert words in (played.failure or "").replace("\\\\", "\\").replace("\\'", "'")


@bubblewrap
def test_links_of_the_agent_do_not_lead_to_the_reward(tmp_path: Path) -> None:
    links = "ln -s /logs/verifier/reward.txt out.txt; ln -sfn /tests tests; ln -sfn / root"
    played = work(write_task(tmp_path, "echo 0 > /logs/verifier/reward.txt; cat out.txt > /dev/null"), links)
    assert played.reward == 0.0


# ---------------------------------------------------------------------------------------------------------------
# Ends


async def _cancelled(folder: Path, shelf: Path, end: Callable[[PlayLoop, Any], Any]) -> None:
    """Begin an episode, and end it by ``end`` while its command is running."""
    environment = HarborEnvironment(0, str(folder))
    said = call("trap '' TERM; setsid sleep 1000 & touch running; sleep 1000")
    async with aclosing(PlayLoop()) as loop:
        episode = scripted_episode(lambda prompt: said)
        playing = start(play(environment, environment.item(0), episode, loop, timeout_s=600.0))
        deadline = time.monotonic() + SOON_S
        while not glob.glob(f"{shelf}/*/work/running"):
            assert time.monotonic() < deadline and not playing.done(), "the command has not begun"
            await asyncio.sleep(0.01)
        assert marked_processes(str(shelf))
        await end(loop, playing)
        await cancel_and_wait(playing)


@bubblewrap
@pytest.mark.parametrize(
    "end",
    [lambda loop, playing: cancel_and_wait(playing), lambda loop, playing: loop.aclose()],
    ids=["the episode is cancelled", "the run ends"],
)
def test_an_episode_that_is_cancelled_leaves_no_directory_and_no_process(
    tmp_path: Path, shelf: Path, end: Callable[[PlayLoop, Any], Any]
) -> None:
    asyncio.run(_cancelled(write_task(tmp_path), shelf, end))
    deadline = time.monotonic() + SOON_S
    while list(shelf.iterdir()) or marked_processes(str(shelf)):
        assert time.monotonic() < deadline, [*shelf.iterdir(), *marked_processes(str(shelf))]
        time.sleep(0.01)


# ---------------------------------------------------------------------------------------------------------------
# Docker and Podman

ENGINE = r"""#!{python}
import json, os, pathlib, subprocess, sys
arguments = sys.argv[1:]
with open({log!r}, "a") as file:
    file.write(json.dumps(arguments) + "\n")
if arguments[0] == "info" and {down}:
    sys.exit("cannot connect to the daemon")
if arguments[:2] == ["image", "inspect"] and arguments[2] == "absent":
    sys.exit("no such image")
if arguments[0] == "exec":
    sys.exit(subprocess.call(arguments[2:]))
logs = [word for word in arguments if word.endswith(":/logs/verifier")]
if logs:
    pathlib.Path(logs[0].removeprefix("--volume=").split(":")[0], "reward.txt").write_text("0.75")
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[[], list[list[str]]]]:
    """Put an executable on PATH that records how it is called; return a function that reads the record."""

    def install(name: str = "docker", down: bool = False) -> Callable[[], list[list[str]]]:
        folder, log = tmp_path / "bin", tmp_path / "log"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(ENGINE.format(python=sys.executable, log=str(log), down=down))
        (folder / name).chmod(0o755)
        others = [path for path in ("/usr/bin", "/bin") if not (Path(path) / "podman").exists()]
        monkeypatch.setenv("PATH", os.pathsep.join([str(folder), *others]))
        harbor_sandboxes.container_engine.cache_clear()
        return lambda: [json.loads(line) for line in log.read_text().splitlines()]

    return install


IMAGE = """
[verifier]
env = { KEY = "v" }
[environment]
docker_image = "task:1"
cpus = 2
memory_mb = 512
env = { OWN = "e" }
"""


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_a_task_with_an_image_runs_in_a_container_without_a_network(
    tmp_path: Path, stand_in: Callable[..., Callable[[], list[list[str]]]], engine: str
) -> None:
    if engine == "podman":
        stand_in("docker", down=True)
    calls = stand_in(engine)
    played = work(write_task(tmp_path / "task", toml=IMAGE, environment__Dockerfile="FROM debian\nRUN x\n"), "echo hi")
    assert results(played) == ["hi"]
    assert played.reward == 0.75
    words = [words for words in calls() if words[0] not in ("info", "image")]
    assert [one[0] for one in words] == ["run", "exec", "commit", "rm", "run", "rm", "rm", "rmi"]
    name = words[0][words[0].index("--name") + 1]
    assert words[1] == ["exec", name, "bash", "-c", "echo hi"]
    for run in (words[0], words[4]):
        for option, value in (
            ("--network", "none"),
            ("--memory", "512m"),
            ("--memory-swap", "512m"),
            ("--cpus", "2"),
            ("--pids-limit", "128"),
            ("--security-opt", "no-new-privileges"),
            ("--pull", "never"),
        ):
            assert run[run.index(option) + 1] == value
        assert "--env=OWN=e" in run
    assert words[0][-4:] == ["--entrypoint", "sleep", "task:1", "infinity"]
    assert not [word for word in words[0] if "/logs" in word or "/tests" in word or "KEY" in word]
    assert "--env=KEY=v" in words[4] and "bash /tests/test.sh" in words[4][-1]
    assert words[3] == ["rm", "--force", name]
    assert words[7] == ["rmi", "--force", name]


def test_a_command_that_hangs_in_a_container_ends_with_all_its_processes(
    tmp_path: Path, stand_in: Callable[..., Callable[[], list[list[str]]]]
) -> None:
    calls = stand_in()
    played = work(write_task(tmp_path / "task", toml=IMAGE), "echo hi; sleep 1000", command_timeout_s=0.5)
    assert results(played) == ["hi\n[ended after 0.5 s]"]
    assert [words[0] for words in calls() if words[0] not in ("info", "image")][:3] == ["run", "exec", "restart"]


def test_a_task_with_an_image_is_refused_without_an_engine_that_has_it(
    tmp_path: Path, stand_in: Callable[..., Callable[[], list[list[str]]]]
) -> None:
    folder = write_task(tmp_path / "task", toml="[environment]\ndocker_image = 'absent'")
    for down, words in (
        (True, "`docker info`: cannot connect to the daemon"),
        (False, "`docker image inspect absent`: no such"),
    ):
        stand_in(down=down)
        with pytest.raises(
            ConfigError, match=f"the image 'absent' must already be present in Docker.*{words}.*podman is not inst"
        ):
            HarborEnvironment(0, str(folder))


def test_a_task_without_an_image_is_refused_where_there_is_no_bubblewrap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    harbor_sandboxes._bubblewrap_problem.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"needs bubblewrap .*: bwrap is not installed"):
            HarborEnvironment(0, str(write_task(tmp_path / "task")))
    finally:
        harbor_sandboxes._bubblewrap_problem.cache_clear()


# ---------------------------------------------------------------------------------------------------------------
# Runs


@bubblewrap
@pytest.mark.timeout(300)
def test_a_run_trains_on_the_rewards_of_verifiers(tmp_path: Path, model_dir: Path) -> None:
    write_task(tmp_path / "task", "echo 0.$RANDOM > /logs/verifier/reward.txt")
    params = f'{{ tasks = "{tmp_path / "task"}", max_turns = 2 }}'
    run = RunProcess(
        *(tmp_path, model_dir, "--task.name", "harbor", "--task.params", params),
        *("--sampling.max_tokens", "12", "--run.num_steps", "2"),
    )
    try:
        assert run.wait() == 0, run.output()
        assert [row["version"] for row in run.rows()] == [1, 2]
        assert run.summary()["task"] == "harbor task"
        assert run.summary()["failed_episodes"] == {}
    finally:
        run.kill()


@bubblewrap
@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_a_tiny_model_learns_the_tasks_of_the_example(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("src", "examples"))}
    model = tmp_path / "harbor"
    command = [python(), "-m", "inflight", "tiny-model", str(model), "--task", "harbor_turns:HarborTurns"]
    command += ["--style", "answer", "--steps", "800", "--wrong-fraction", "0"]
    subprocess.run(command, check=True, timeout=600, env={**os.environ, **environment})
    run = RunProcess(tmp_path, model, environment=environment, config=ROOT / "examples" / "harbor.toml")
    assert run.wait(timeout_s=900) == 0, run.output()
    assert run.summary()["last_reward"] > run.summary()["first_reward"] + 0.2
