"""What the kit says of an endpoint that dies in the middle: one failure, and where it came from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from inflight.conformance.checks import select
from inflight.conformance.endpoint.catalogue import CHECKS
from inflight.conformance.frames import innermost_frame, own_frame
from inflight.conformance.kit import Kit
from inflight.conformance.suite import run_suite
from inflight.conformance.targets import EndpointTarget
from inflight.conformance.verdicts import Certificate, CheckOutcome
from inflight.errors import InflightError, PoisonedError
from tests.conformance import dying
from tests.gates import wait_until

pytestmark = pytest.mark.usefixtures("forks")
ASKED = ("E-01", "E-10", "E-12", "E-14", "E-16", "E-51", "E-17", "U-01", "U-02", "E-60")
"""All need a token but the first; E-51 is for servers."""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def certificate_of(target: EndpointTarget) -> Certificate:
    checks = [check for name in ASKED for check in select(CHECKS, [name])]
    with Kit(target) as kit:
        return run_suite(kit, checks)


def test_when_an_endpoint_dies_one_check_fails_and_the_rest_are_skipped(tmp_path: Path) -> None:
    options = {"after": 3, "grave": str(tmp_path / "grave")}
    found = certificate_of(EndpointTarget(factory="tests.conformance.dying:start", options=options))
    failed = [verdict for verdict in found.verdicts if verdict.outcome is CheckOutcome.FAILED]
    assert len(failed) == 1, [str(verdict) for verdict in failed]
    (root,) = failed
    assert not found.conforms
    assert "this is the failure that matters: the checks that follow were skipped" in root.message
    assert "the endpoint was unavailable after it: JSONDecodeError was raised at " in root.message
    assert f"thread engine ended with JSONDecodeError at {dying.__file__}:" in root.message
    later = found.verdicts[found.verdicts.index(root) + 1 :]
    assert len(later) >= 5
    for verdict in later:
        assert verdict.outcome is CheckOutcome.SKIPPED
        if verdict.id != "E-51":
            assert verdict.message == f"the endpoint has been unavailable since {root.id}"


def test_an_endpoint_that_can_be_made_anew_costs_one_check_and_shows_its_own_line(tmp_path: Path) -> None:
    options = {"after": 3, "grave": str(tmp_path / "grave"), "comes_back": True}
    found = certificate_of(EndpointTarget(factory="tests.conformance.dying:start", options=options))
    (root,) = [verdict for verdict in found.verdicts if verdict.outcome is CheckOutcome.FAILED]
    others = [verdict for verdict in found.verdicts if verdict.id not in (root.id, "E-51")]
    assert {verdict.outcome for verdict in others} == {CheckOutcome.PASSED}
    assert "matters" not in root.message
    lines = Path(dying.__file__).read_text().splitlines()
    number = 1 + next(i for i, line in enumerate(lines) if 'json.loads("the engine' in line)
    assert f"JSONDecodeError was raised at {dying.__file__}:{number} in generate" in root.message


def test_a_server_that_is_killed_between_two_checks_fails_the_next_one_only(tmp_path: Path) -> None:
    from inflight.conformance.models import make_tiny_model

    model, ready = make_tiny_model(tmp_path / "model"), tmp_path / "ready"
    command = [sys.executable, "-m", "inflight", "serve", str(model), "--port", "0", "--ready-file", str(ready)]
    environment = {**os.environ, "INFLIGHT_TOKEN": "t"}
    with subprocess.Popen([*command, "--exit-with-stdin"], stdin=subprocess.PIPE, env=environment) as server:
        try:
            wait_until(lambda: ready.exists() or server.poll() is not None, "the server does not start")
            assert server.poll() is None
            started = json.loads(ready.read_text())
            url, pid = started["url"], started["pid"]
            with Kit(EndpointTarget(url=url, token="t", model=model)) as kit:
                (first, second, third) = (select(CHECKS, [name])[0] for name in ("E-10", "E-12", "E-14"))
                assert kit.run(first).outcome is CheckOutcome.PASSED
                os.kill(pid, signal.SIGKILL)
                server.wait()
                killed, skipped = kit.run(second), kit.run(third)
        finally:
            server.kill()
    assert killed.outcome is CheckOutcome.FAILED
    words = "the endpoint could not be restored for this check, which did not run: Unreachable"
    assert killed.message.startswith(words)
    assert skipped.outcome is CheckOutcome.SKIPPED
    assert skipped.message == "the endpoint has been unavailable since E-12"


def test_the_frame_of_a_cause_comes_first_and_the_kit_has_none() -> None:
    def broken() -> None:
        try:
            json.loads("no JSON")
        except ValueError as error:
            raise PoisonedError("torn") from error

    with pytest.raises(PoisonedError) as caught:
        broken()
    place = own_frame(caught.value)
    assert place is not None
    assert place.startswith(f"{__file__}:") and place.endswith(" in broken")
    with pytest.raises(InflightError) as caught_in_inflight:
        select(CHECKS, ["X-1"])
    assert (own_frame(caught_in_inflight.value) or "").startswith(f"{__file__}:")
    code = compile("1 / 0", "<string>", "exec")
    with pytest.raises(ZeroDivisionError) as nowhere:
        exec(code)
    error = nowhere.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # without this test's own frame
    assert own_frame(error) is None
    assert innermost_frame(error).startswith("<string>:1")
