"""The kit judges servers that speak vLLM's four phases without inflight's plug-in, here our own dialect."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inflight.cli import main
from inflight.commands import check
from inflight.errors import ConfigError
from inflight_vllm.four_phases import FOUR_PHASES
from tests.dialects.programs import Program
from tests.dialects.test_engine_routes import Client, Start, start  # noqa: F401
from tests.selection import first_of_each
from tests.servers import TOKEN, ServerProcess
from tests.weights.workers import weight_version
from tests.zygote import python


def verdicts(client: Client, model: Path, directory: Path, *checks: str) -> dict[str, str]:
    """Return the verdict of each check of ``inflight check endpoint``, of all checks if none is named."""
    url = client.url.replace("http://", "fourphase+http://")
    command = [python(), "-m", "inflight", "check", "endpoint"]
    command += [f"{url}?model_dir={model}&directory={directory}&seeds=1", "--model", str(model)]
    command += ["--json", str(directory / "found.json")]
    command += [word for check in checks for word in ("--check", check)]
    environment = {"INFLIGHT_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads((directory / "found.json").read_text())
    return {it["id"]: f"{it['outcome']} {it['message']}".strip() for it in found["verdicts"]}


CHECKS = ("E-10", "E-36", "U-03", "U-20", "U-22", "U-26", "U-31", "U-32", "U-37", "U-53")
"""At least one of each policy, of caches, and of an update that fails; the exhaustive test has all checks."""


def test_our_four_phases_hold_to_the_contract(
    start: Start,  # noqa: F811
    start_server: Callable[..., ServerProcess],
    model_dir: Path,
    tmp_path: Path,
) -> None:
    client = start(model_dir, start_server(model_dir, "--max-model-len", "384"))  # the kit fills contexts
    found = verdicts(client, model_dir, tmp_path / "updates", *CHECKS)
    assert {check: verdict for check, verdict in found.items() if verdict != "passed"} == {}


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_our_four_phases_pass_every_check_of_the_kit(
    start: Start,  # noqa: F811
    start_server: Callable[..., ServerProcess],
    model_dir: Path,
    tmp_path: Path,
) -> None:
    found = verdicts(start(model_dir, start_server(model_dir)), model_dir, tmp_path / "updates")
    assert {check: it for check, it in found.items() if it.split()[0] not in ("passed", "skipped")} == {}
    assert list(found.values()).count("passed") >= 100


@pytest.mark.parametrize(
    ("fault", "check"),
    first_of_each([("scalar-version", "U-32"), ("lost-update", "U-02"), ("no-pause", "E-30")], lambda _: "any"),
)
def test_the_kit_finds_the_fault_of_a_four_phase_server(
    fault: str, check: str, start_server: Callable[..., ServerProcess], model_dir: Path, tmp_path: Path
) -> None:
    (directory := tmp_path / "updates").mkdir()
    arguments = [fault, start_server(model_dir).url, "--port", "0", "--directory", str(directory)]
    program = Program(
        tmp_path / "broken.log", "tests.dialects.four_phase_server", *arguments, "--model", str(model_dir)
    )
    try:
        url = program.line_with("routes at").split(" at ")[1].split(",")[0]
        assert verdicts(Client(url, program), model_dir, directory, check)[check].startswith("failed")
    finally:
        program.stop()


def test_a_server_without_the_routes_or_a_url_without_directories_is_refused(
    shared_server: ServerProcess, model_dir: Path, tmp_path: Path
) -> None:
    def refusal(query: str) -> Any:
        endpoint = FOUR_PHASES.connect(
            shared_server.url + query, token=TOKEN, control_timeout_s=10, generate_timeout_s=30
        )

        async def attach() -> Any:
            try:
                return await endpoint.capabilities()
            finally:
                await endpoint.aclose()

        return asyncio.run(attach())

    for query in ("", f"?model_dir={model_dir}", f"?model_dir={model_dir}&directory={tmp_path}/missing"):
        with pytest.raises(ConfigError, match="model_dir=DIRECTORY&directory=DIRECTORY"):
            refusal(query)
    with pytest.raises(Exception, match="/server_info"):
        refusal(f"?model_dir={model_dir}&directory={tmp_path}")
    assert weight_version(shared_server).state == "ready"


@pytest.mark.parametrize(
    ("query", "said"),
    [("?model_dir=.", "directory is missing"), ("?model_dir=.&directory=.", "check that the server is running")],
)
def test_a_check_that_cannot_attach_ends_before_the_kit_is_loaded(
    query: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "_load_checks", lambda kind: pytest.fail("the kit was loaded"))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"fourphase+http://127.0.0.1:{unused.getsockname()[1]}{query}"
        assert main(["check", "endpoint", url]) == 1
    assert said in capsys.readouterr().err


def test_a_label_that_another_client_gave_is_refused_when_attaching(
    start: Start,  # noqa: F811
    start_server: Callable[..., ServerProcess],
    model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INFLIGHT_TOKEN", TOKEN)
    monkeypatch.setattr(check, "_load_checks", lambda kind: pytest.fail("the kit was loaded"))
    client = start(model_dir, start_server(model_dir))
    client.post("/update_weight_version", {"new_version": "step-7"})
    url = f"{client.url.replace('http', 'fourphase+http')}?model_dir={model_dir}&directory={tmp_path / 'updates'}"
    assert main(["check", "endpoint", url]) == 1
    assert "'step-7'" in (said := capsys.readouterr().err) and "Restart the inference server" in said
