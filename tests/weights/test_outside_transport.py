"""A transport that is not inflight's own is found by its entry point, carries a publish, and goes through the kit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from examples.own_transport import TCP, TcpSender
from transformers import AutoModelForCausalLM

from inflight.base.transport_registry import find_transport, installed_transports
from inflight.conformance.checks import Check
from inflight.conformance.kit import Kit
from inflight.conformance.targets import TransportTarget
from inflight.conformance.transport.catalogue import CHECKS
from inflight.conformance.verdicts import CheckOutcome
from inflight.errors import ConfigError
from inflight.weights.send.module import ModuleWeights
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.weights.transports import make_sender, named_transport
from tests.selection import first_of_each
from tests.servers import TOKEN, ServerProcess

pytestmark = pytest.mark.usefixtures("forks")
REFERENCE = "examples.own_transport:TCP"
OURS = ["file", "gloo", "http", "ipc", "nccl", "shm"]


def install(directory: Path, name: str = "tcp", reference: str = REFERENCE, package: str = "outside") -> Path:
    """Write what an installer writes of a package with one transport."""
    metadata = directory / f"{package}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[inflight.transports]\n{name} = {reference}\n")
    return directory


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(place))
    return place


@pytest.fixture
def server(
    installed: Path, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ServerProcess]:
    monkeypatch.setenv("PYTHONPATH", str(installed), prepend=":")
    server = ServerProcess(model_dir, tmp_path / "server")
    server.wait_until_ready()
    yield server
    server.kill()


def test_a_server_declares_an_installed_transport_and_a_publish_goes_over_it(
    server: ServerProcess, model_dir: Path
) -> None:
    assert httpx.get(f"{server.url}/capabilities").json()["transports"] == ["file", "gloo", "http", "shm", "tcp"]
    weights = ModuleWeights(AutoModelForCausalLM.from_pretrained(model_dir))
    with WeightPublisher.connect([server.url], run_id="run", token=TOKEN, transport="tcp") as publisher:
        for version in (1, 2):
            weights.version = version
            publish_weights(weights, publisher)
            assert httpx.get(f"{server.url}/weight_version").json()["version"] == version
        assert publisher.group.transport == "tcp"


def test_a_spec_chooses_among_what_is_installed_and_is_read_as_its_transport_says(server: ServerProcess) -> None:
    refused = {
        "pigeon": "the pigeon transport is not installed here; installed: file, gloo, http, ipc, nccl, shm, tcp",
        "examples.own_transport:TCP": "transport: String should match pattern",
        "tcp": "port: Input should be less than or equal to 65535",
        "nccl": "key 'group_name' is missing",
    }
    headers = {"authorization": f"Bearer {TOKEN}"}
    for transport, words in refused.items():
        spec = {"run_id": "r", "transport": transport, "timeout_s": 1, "host": "h", "port": 2**16, "token": "0" * 32}
        answer = httpx.post(f"{server.url}/init_process_group", json=spec, headers=headers)
        assert (answer.status_code, words in answer.json()["error"]["message"]) == (400, True), answer.text


def test_a_transport_is_named_by_its_entry_point_or_by_module_and_attribute(installed: Path) -> None:
    assert sorted([*OURS, "tcp"]) == [transport.name for transport in installed_transports()]
    assert find_transport("tcp") is named_transport("tcp") is named_transport(REFERENCE) is TCP
    assert isinstance(make_sender(REFERENCE), TcpSender)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pigeon", "unknown transport 'pigeon'; known: file, gloo, http, ipc, nccl, shm"),
        ("examples.own_transport:nothing", "cannot be imported"),
        ("examples.own_transport:TcpSpec", "is a .*, not a Transport"),
    ],
)
def test_what_is_no_transport_is_refused_with_what_is_installed(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_sender(text)


@pytest.mark.parametrize(
    ("name", "reference", "words"),
    [
        ("tcp", "examples.nowhere:TCP", "cannot be loaded"),
        ("pigeon", REFERENCE, "is not a Transport of that name"),
        ("gloo", REFERENCE, "two packages install 'gloo' in transports"),
    ],
)
def test_a_package_that_installs_something_else_is_named(
    name: str, reference: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(install(tmp_path, name, reference)))
    with pytest.raises(ConfigError, match=words):
        installed_transports()


@pytest.fixture(scope="module")
def kit() -> Iterator[Kit]:
    with Kit(TransportTarget(factory=REFERENCE)) as kit:
        yield kit


@pytest.mark.parametrize("check", first_of_each(CHECKS, lambda check: check.level), ids=str)
def test_the_kit_checks_it(check: Check, kit: Kit) -> None:
    verdict = kit.run(check)
    of_torch = check.id == "T-01"
    assert verdict.outcome is (CheckOutcome.SKIPPED if of_torch else CheckOutcome.PASSED), (
        verdict.message + verdict.stacks
    )
