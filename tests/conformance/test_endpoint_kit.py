"""The kit over the embedded endpoint: it passes everything, and each faulty variant is caught by its check."""

from __future__ import annotations

import contextlib
import functools
import gc
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import inflight.conformance.endpoint.images
import inflight.conformance.endpoint.subject
import inflight.engines.embedded.parameters
import inflight.engines.embedded.sampler
import inflight.engines.embedded.sequences
import inflight.engines.embedded.stepping
import inflight.weights.encode.delta
import inflight.weights.encode.float8
import inflight.weights.receive.base_weights
import inflight.weights.receive.staging
from inflight.conformance.checks import Check
from inflight.conformance.endpoint.catalogue import CHECKS
from inflight.conformance.endpoint.judged import JudgedEndpoint
from inflight.conformance.endpoint.publishing import SteppedPublisher
from inflight.conformance.judge import judge
from inflight.conformance.kit import Kit
from inflight.conformance.models import make_tiny_model
from inflight.conformance.targets import EndpointTarget
from inflight.conformance.verdicts import CheckOutcome
from inflight.weights.transports import device_memory
from inflight.weights.transports.installed import IpcTransport
from tests.conformance.broken import logs_in, require_not_broken
from tests.conformance.mutants import MUTANTS, target_of
from tests.conformance.mutants.mutant import Mutant
from tests.selection import first_of_each
from tests.weights.stored import share_host_memory
from tests.weights.test_publisher_machine import DECLARED
from tests.zygote import python

EMBEDDED = "inflight.engines.embedded.loading:load_endpoint"
SMALL = {"drafts": "both", "max_model_len": 1024, "max_concurrent": 16}
"""Checks fill the context and the slots: half of the model's and a quarter of the default show what all would."""

pytestmark = pytest.mark.usefixtures("forks")
PATCHED = (
    *((inflight.engines.embedded.stepping, "sample"), (inflight.weights.encode.float8, "decode_float8")),
    (inflight.engines.embedded.sampler, "_apply_filters"),
    (inflight.engines.embedded.stepping, "_note_experts"),
    (inflight.engines.embedded.parameters.StoredTensors, "assemble"),
    (inflight.weights.receive.base_weights, "merge_lora"),
    (inflight.weights.encode.delta, "_indices"),
    (inflight.weights.receive.staging.Staging, "_receive_checked"),
    *((inflight.weights.receive.staging.Staging, name) for name in ("keep", "_receive_ahead")),
    (inflight.engines.embedded.sequences.Sequence, "note_routed"),
    *((device_memory, "CudaMemory"), (IpcTransport, "needs_gpu")),
    *(
        (inflight.weights.receive.staging, name)
        for name in ("views_of", "read_part", "places_of", "checksum_as", "decode")
    ),
)
"""What mutants change for a whole process."""
CHECK_OF_ID = {check.id: check for check in CHECKS}
OF_A_SERVER = [check for check in CHECKS if {"url", "process"} & set(check.needs)]
PYTHON = sys.executable
SERVE = "serve {model} --port {port} --token-file {token_file} --threads 1"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Torch's threads wait for each other by spinning: on machines that do other work too, for most of the time."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def kit() -> Iterator[Kit]:
    with Kit(EndpointTarget(factory=EMBEDDED, options=SMALL)) as kit:
        yield kit


@pytest.fixture(scope="module")
def coarse_kit(tmp_path_factory):
    """A kit for an endpoint in bfloat16 with more tokens than the kit's own models have."""
    model = make_tiny_model(tmp_path_factory.mktemp("coarse") / "model", vocab_size=9_000)
    options = {**SMALL, "dtype": "bfloat16"}
    with Kit(EndpointTarget(factory=EMBEDDED, model=model, options=options)) as kit:
        yield kit


@pytest.mark.parametrize(
    ("name", "evidence"),
    [
        ("E-20", "tokens_of_a_known_text"),
        ("E-75", "largest logprob difference after images"),
        ("E-80", "tokens before and after a recompute"),
        ("U-18", "largest logprob difference, 8192 tokens"),
    ],
)
def test_checks_that_start_another_endpoint_take_its_dtype_and_vocabulary(coarse_kit, name, evidence):
    verdict = coarse_kit.run(CHECK_OF_ID[name])
    assert verdict.outcome not in (CheckOutcome.FAILED, CheckOutcome.HUNG), f"{verdict.message}\n{verdict.evidence}"
    assert evidence in verdict.evidence, "the part with the other endpoint was done, even if the rest was skipped"


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_the_embedded_endpoint_passes(kit, check):
    verdict = kit.run(check)
    if verdict.outcome is CheckOutcome.SKIPPED:
        is_for_others = verdict.message == "scoring is supported"
        assert is_for_others or {"url", "process", "ipc"} & set(check.needs), verdict.message
    else:
        assert verdict.outcome is CheckOutcome.PASSED, f"{verdict.message}\n{verdict.evidence}\n{verdict.stacks}"


def test_the_embedded_endpoint_passes_over_memory_of_a_device_which_is_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_host_memory(monkeypatch.setattr)
    subject = JudgedEndpoint(EndpointTarget(factory="tests.conformance.mutants:make_over_ipc"), tmp_path, 60)
    try:
        verdict = judge(subject, CHECK_OF_ID["U-63"]).verdict
    finally:
        subject.close()
    assert verdict.outcome is CheckOutcome.PASSED, f"{verdict.message}\n{verdict.evidence}\n{verdict.stacks}"


def test_consecutive_checks_with_one_model_share_an_endpoint_until_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    real = inflight.conformance.endpoint.subject.open_target

    def counted(target: EndpointTarget, model: Path, *arguments: Any) -> Any:
        opened.append(model)
        return real(target, model, *arguments)

    monkeypatch.setattr(inflight.conformance.endpoint.subject, "open_target", counted)
    subject = JudgedEndpoint(EndpointTarget(factory=EMBEDDED, options=SMALL), tmp_path, 60)
    outcomes, counts = [], []
    try:
        for name, tower in (
            ("E-75", True),
            ("E-73", True),
            ("E-74", True),
            ("E-75", True),
            ("E-74", False),
            ("E-73", True),
        ):
            if not tower:  # nothing is updated, so the check fails
                monkeypatch.setattr(inflight.conformance.endpoint.images, "_TOWER", ("none",))
            outcomes.append(judge(subject, CHECK_OF_ID[name]).verdict.outcome)
            counts.append(len(opened))
    finally:
        subject.close()
    assert outcomes == [*[CheckOutcome.PASSED] * 4, CheckOutcome.FAILED, CheckOutcome.PASSED]
    assert counts == [1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize(("num_gpus", "transport"), [(0, "gloo"), (1, "gloo"), (2, "nccl")])
def test_nccl_is_taken_only_where_there_is_a_gpu_for_each_end(
    num_gpus: int, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    declared = DECLARED.model_copy(update={"transports": ("gloo", "nccl")})
    endpoint: Any = None  # it is not asked
    assert SteppedPublisher(endpoint, declared).transport() == transport


@pytest.fixture(scope="module")
def kit_of_a_server() -> Iterator[Callable[[Check], Kit]]:
    """Return the kit for a check: over a forked server, or over a plain one if the check stops it by SIGSTOP."""
    with contextlib.ExitStack() as kits:

        @functools.cache
        def kit(interpreter: str) -> Kit:
            command = f"{shlex.quote(interpreter)} -m inflight {SERVE}"
            return kits.enter_context(Kit(EndpointTarget(command=command)))

        yield lambda check: kit(PYTHON if check.id == "U-52" else python())


@pytest.mark.parametrize("check", OF_A_SERVER, ids=str)
def test_the_embedded_server_passes(kit_of_a_server, check):
    verdict = kit_of_a_server(check).run(check)
    assert verdict.outcome is CheckOutcome.PASSED, f"{verdict.message}\n{verdict.evidence}\n{verdict.stacks}"


def test_every_check_has_a_mutant():
    assert {mutant.caught_by for mutant in MUTANTS.values()} == set(CHECK_OF_ID)


@pytest.mark.parametrize(
    "mutant",
    first_of_each(MUTANTS.values(), lambda mutant: CHECK_OF_ID[mutant.caught_by].level),
    ids=lambda mutant: mutant.name.replace(" ", "-"),
)
@pytest.mark.filterwarnings("ignore")  # a faulty endpoint leaves tasks and threads behind
def test_a_faulty_endpoint_is_caught(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    for module, name in PATCHED:
        monkeypatch.setattr(module, name, getattr(module, name))  # which puts it back in the end
    check = CHECK_OF_ID[mutant.caught_by]
    if mutant.over_http:
        if "process" in check.needs:  # it signals the process that it started
            monkeypatch.setattr(sys, "executable", PYTHON)
        with Kit(target_of(mutant)) as kit:
            verdict = kit.run(check)
            logs = logs_in(kit._directory)
    else:  # in this process, which saves starting one
        subject = JudgedEndpoint(target_of(mutant), tmp_path, 60)
        try:
            verdict = judge(subject, check).verdict
        finally:
            subject.close()
            gc.collect()  # here, and not in the middle of another test
        logs = [caplog.text]
    assert verdict.outcome in (CheckOutcome.FAILED, CheckOutcome.HUNG), (
        f"{verdict.outcome}: {verdict.message} {verdict.evidence}"
    )
    require_not_broken(verdict, logs)
