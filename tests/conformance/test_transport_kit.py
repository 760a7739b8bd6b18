"""The kit on transports: gloo and the stores conform, and every check catches the faults made for it."""

from __future__ import annotations

import functools
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from examples.own_transport import TcpSender, TcpTransport

from inflight.conformance.checks import Check
from inflight.conformance.judge import judge
from inflight.conformance.kit import Kit
from inflight.conformance.targets import TransportTarget
from inflight.conformance.transport import peer as peer_module
from inflight.conformance.transport.catalogue import CHECKS
from inflight.conformance.transport.pair import open_pair
from inflight.conformance.transport.peer import Peer, PeerSetup
from inflight.conformance.transport.sockets import is_loopback, is_wildcard
from inflight.conformance.transport.subject import TransportSubject
from inflight.conformance.verdicts import CheckOutcome
from inflight.errors import ConfigError
from inflight.types import WeightBucket
from inflight.weights.transports import device_memory
from inflight.weights.transports.device_memory import HostMemory
from inflight.weights.transports.installed import ProcessGroupTransport
from inflight.wire import ProcessGroupSpec
from tests.conformance.broken import require_not_broken
from tests.conformance.transport_mutants import MUTANTS
from tests.gates import SOON_S
from tests.selection import first_of_each

pytestmark = pytest.mark.usefixtures("forks")
MAKE = "tests.conformance.transport_mutants:make"
BY_ID = {check.id: check for check in CHECKS}
OF_GROUPS = [check for check in CHECKS if not {"files", "shared-memory"} & set(check.needs)]


@pytest.fixture(scope="module")
def name_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("mutants") / "name"
    file.write_text("")
    return file


@pytest.fixture(scope="module")
def faulty(name_file: Path) -> Iterator[Callable[[str], Kit]]:
    """Writes the name of a mutant, or "" for none, and returns a session of the kit for transports of its type."""
    with ExitStack() as stack:

        @functools.cache
        def kit_of(transport: str) -> Kit:
            return stack.enter_context(Kit(TransportTarget(factory=MAKE, options={"mutant_file": str(name_file)})))

        def with_fault(name: str) -> Kit:
            name_file.write_text(name)
            return kit_of(MUTANTS[name].transport if name else "gloo")

        yield with_fault


@pytest.mark.parametrize("check", first_of_each(OF_GROUPS, lambda check: check.level), ids=str)
def test_gloo_conforms_even_where_it_insists_on_begin(check: Check, faulty: Callable[[str], Kit]) -> None:
    verdict = faulty("").run(check)
    assert verdict.outcome is CheckOutcome.PASSED, verdict.message + verdict.stacks
    assert verdict.evidence


def test_buckets_arrive_over_a_store() -> None:
    with Kit(TransportTarget(factory="shm")) as kit:
        for check in (it for it in CHECKS if it.level == "bytes" and "files" not in it.needs):
            assert (verdict := kit.run(check)).outcome is CheckOutcome.PASSED, verdict.message


@pytest.mark.exhaustive
@pytest.mark.parametrize("store", ["shm", "file", "http"])
def test_stores_conform_in_what_does_not_need_ranks_that_meet(store: str) -> None:
    with Kit(TransportTarget(factory=store)) as kit:
        verdicts = {check.id: kit.run(check) for check in CHECKS}
    assert not [it.message for it in verdicts.values() if it.outcome not in (CheckOutcome.PASSED, CheckOutcome.SKIPPED)]
    skipped = {id for id, it in verdicts.items() if it.outcome is CheckOutcome.SKIPPED}
    of_others = {"collective", "process-group", "files" if store == "shm" else "shared-memory"}
    assert skipped == {check.id for check in CHECKS if of_others & set(check.needs)}


def test_the_transport_of_the_docs_conforms() -> None:
    with Kit(TransportTarget(factory="examples.own_transport:TCP")) as kit:
        for check in CHECKS:
            kit.run(check).raise_unless_good()


def test_what_the_first_group_of_a_process_leaves_is_found_after_other_checks(name_file: Path) -> None:
    with Kit(TransportTarget(factory=MAKE, options={"mutant_file": str(name_file)})) as kit:
        name_file.write_text("keeps one listener")
        assert kit.run(BY_ID["T-08"]).outcome is CheckOutcome.PASSED
        verdict = kit.run(BY_ID["T-35"])
    assert verdict.outcome is CheckOutcome.FAILED
    assert "still listens" in verdict.message


class _PatientSender(TcpSender):
    """Restarts the timeout of a send for each rank that it sends to."""

    rank_s = 0.0

    def send(self, bucket: WeightBucket, timeout_s: float) -> None:
        self.rank_s = timeout_s
        super().send(bucket, timeout_s)

    def write(self, to: socket.socket, data: memoryview, deadline: float) -> None:
        super().write(to, data, max(deadline, time.monotonic() + self.rank_s))


class _PatientTransport(TcpTransport):
    def sender(self, *, address: str, directory: Path | None) -> _PatientSender:
        return _PatientSender(address)


PATIENT = _PatientTransport()


def test_a_timeout_that_restarts_with_each_rank_is_caught() -> None:
    with Kit(TransportTarget(factory="tests.conformance.test_transport_kit:PATIENT")) as kit:
        verdict = kit.run(BY_ID["T-39"])
    assert verdict.outcome is CheckOutcome.FAILED, verdict.evidence
    assert "a send whose ranks read in turn ended after" in verdict.message


def test_a_second_process_of_the_kit_that_does_not_start_is_not_blamed_on_the_transport(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_module, "READY_S", 0.0)
    monkeypatch.setattr(tempfile, "tempdir", None)
    subject = TransportSubject(TransportTarget(factory="gloo"), tmp_path)
    verdict = judge(subject, BY_ID["T-24"]).verdict
    subject.close()
    assert verdict.outcome is CheckOutcome.SKIPPED
    assert "the kit's own second process did not start" in verdict.message


@pytest.mark.parametrize("name", first_of_each(MUTANTS, lambda name: BY_ID[MUTANTS[name].check].level))
def test_a_fault_is_caught_by_its_check(name: str, faulty: Callable[[str], Kit]) -> None:
    verdict = faulty(name).run(BY_ID[MUTANTS[name].check])
    assert verdict.outcome in (CheckOutcome.FAILED, CheckOutcome.HUNG), verdict.evidence
    assert verdict.message
    assert verdict.look_at
    assert verdict.outcome is not CheckOutcome.HUNG or verdict.stacks
    require_not_broken(verdict)


def test_every_check_has_a_fault_that_it_catches() -> None:
    assert {mutant.check for mutant in MUTANTS.values()} == set(BY_ID)


def test_a_factory_that_returns_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="is a type, not a Transport"):
        open_pair(TransportTarget(factory="builtins:dict"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_gpus_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="nccl sends from a GPU, and torch sees none here"):
        open_pair(TransportTarget(factory="nccl"))


def test_a_group_of_gpus_needs_one_for_each_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessGroupTransport, "needs_gpu", True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="gloo needs a GPU for each end and torch sees 1"):
        open_pair(TransportTarget(factory="gloo"))


def test_a_store_is_refused_as_such_however_many_gpus_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "CudaMemory", HostMemory)
    for num_gpus in (0, 1, 2):
        monkeypatch.setattr(torch.cuda, "device_count", lambda num_gpus=num_gpus: num_gpus)
        with pytest.raises(ConfigError, match="the ipc transport stores what it sends in GPU memory"):
            open_pair(TransportTarget(factory="ipc"))


def test_a_peer_ends_with_its_parent(tmp_path: Path) -> None:
    peer = Peer()
    assert peer.is_ready()
    peer.set_up(PeerSetup(target=TransportTarget(factory="gloo"), directory=tmp_path))
    peer.member(ProcessGroupSpec)
    process = peer._process
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(SOON_S) == 0  # it waits for its receiver by then, for much longer
    peer.kill()


def test_addresses_are_told_apart() -> None:
    assert all(is_loopback(address) for address in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "localhost"))
    assert not any(is_loopback(address) for address in ("0.0.0.0", "10.0.0.1", "::", "trainer.example"))
    assert all(is_wildcard(address) for address in ("0.0.0.0", "::", "::ffff:0.0.0.0"))
    assert not any(is_wildcard(address) for address in ("127.0.0.1", "::1"))
