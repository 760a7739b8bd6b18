"""Certificates know the sources that they depend on: a change of one of them, and of nothing else, makes them void."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import inflight
from inflight.conformance import sources
from inflight.conformance.checks import Check
from inflight.conformance.kit import Kit
from inflight.conformance.report.files import certificate_json
from inflight.conformance.sources import digest, is_current
from inflight.conformance.suite import run_suite
from inflight.conformance.targets import WorkerTarget
from inflight.conformance.verdicts import Verdict
from inflight.conformance.worker.catalogue import CHECKS
from tests.conformance.certificates import FAILED, PASSED, certificate

INSTALLED = Path(inflight.__file__).parents[1]
TARGET, COMMAND = "inflight_fsdp:FSDP", "inflight serve {model} --engine vllm"


def digest_of(target: str) -> str:
    return digest("endpoint", target, "vllm") if target == COMMAND else digest("worker", target, "")


@pytest.fixture(scope="module")
def before() -> dict[str, str]:
    """The digests of the installed packages, which are those of an unchanged copy."""
    return {target: digest_of(target) for target in (TARGET, COMMAND)}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages, copied to where tests may change them."""
    path = tmp_path_factory.mktemp("packages")
    for package in ("inflight", "inflight_fsdp", "inflight_vllm"):
        shutil.copytree(INSTALLED / package, path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return path


@pytest.fixture
def copy(packages: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The copied packages, which are restored after the test."""
    monkeypatch.setattr(sources, "_INFLIGHT", packages / "inflight")
    found = sources._package
    monkeypatch.setattr(sources, "_package", lambda *names: packages / found(*names).name)  # type: ignore[union-attr]
    files = {path: path.stat().st_mtime_ns for path in packages.rglob("*.py")}
    yield packages
    for path in {*packages.rglob("*.py"), *files}:
        if path not in files:
            path.unlink()
        elif not path.exists() or path.stat().st_mtime_ns != files[path]:
            shutil.copy2(INSTALLED / path.relative_to(packages), path)


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("inflight/wire.py", {TARGET, COMMAND}),
        ("inflight/engines/embedded/tiny.py", {TARGET, COMMAND}),
        ("inflight/conformance/judge.py", {TARGET, COMMAND}),
        ("inflight/weights/transports/arenas.py", {TARGET, COMMAND}),  # by its entry point
        ("inflight/http/client.py", {COMMAND}),
        ("inflight/engines/launch.py", {COMMAND}),
        ("inflight/engines/supervise.py", {COMMAND}),
        ("inflight/conformance/doomed.py", {COMMAND}),  # started by its name
        ("inflight/conformance/endpoint/tokens.py", {COMMAND}),
        ("inflight/conformance/endpoint/judged.py", {COMMAND}),
        ("inflight/rollouts/partials.py", {COMMAND}),  # by way of its package
        ("inflight/conformance/worker/ranks.py", {TARGET}),
        ("inflight/losses/tiles.py", {TARGET}),
        ("inflight/rollouts/ledger.py", set()),
        ("inflight/environments/proxy/app.py", set()),
        ("inflight/weights/send/fleet.py", set()),
        ("inflight_fsdp/worker.py", {TARGET}),
        ("inflight_vllm/updates.py", {COMMAND}),
        ("inflight/engines/embedded/engine.py", set()),
        ("inflight/run/run.py", set()),
        ("inflight/conformance/report/page.py", set()),
    ],
)
def test_what_a_certificate_depends_on_changes_its_digest(
    before: dict[str, str], copy: Path, file: str, changes: set[str]
) -> None:
    with (copy / file).open("a") as source:
        source.write("CHANGED = 1\n")
    after = {target: digest_of(target) for target in (TARGET, COMMAND)}
    assert {target for target in before if before[target] != after[target]} == changes


def test_docstrings_and_comments_do_not_change_the_digest(before: dict[str, str], copy: Path) -> None:
    assert {target: digest_of(target) for target in before} == before
    with (copy / "inflight_fsdp" / "worker.py").open("a") as source:
        source.write('# A comment.\n"""A text."""\n')
    assert digest_of(TARGET) == before[TARGET]


def test_a_file_that_comes_or_goes_changes_the_digest(copy: Path) -> None:
    found = {digest_of(TARGET)}
    (copy / "inflight_fsdp" / "new.py").touch()
    found.add(digest_of(TARGET))
    (copy / "inflight_fsdp" / "worker.py").rename(copy / "inflight_fsdp" / "new.py")
    found.add(digest_of(TARGET))
    assert len(found) == 3


@pytest.mark.parametrize(
    ("target", "name"), [("http://127.0.0.1:8000", "stranger"), ("gloo", "gloo"), ("no.such:f", "")]
)
def test_sources_that_are_not_known_have_no_digest(target: str, name: str) -> None:
    assert digest("endpoint", target, name) == ""
    assert not is_current(certificate(PASSED).model_copy(update={"target": target, "implementation": name}))


def test_a_kept_certificate_holds_while_it_conforms_is_whole_and_has_the_digest(tmp_path: Path) -> None:
    known = {"kind": "worker", "target": TARGET, "implementation": "", "sources": digest_of(TARGET)}
    made, failed = certificate(PASSED).model_copy(update=known), certificate(FAILED).model_copy(update=known)
    outdated = {"sources": "0" * 64, "protocol_version": made.protocol_version - 1, "left_out": ("E-02",)}
    kept = tmp_path / "kept.json"
    statuses = []
    for subject in (made, failed, *(made.model_copy(update={name: value}) for name, value in outdated.items())):
        kept.write_text(certificate_json(subject))
        statuses.append(sources.main(kept))
    assert statuses == [0, 1, 1, 1, 1]
    assert sources.main(tmp_path / "missing.json") == 1


@pytest.mark.parametrize("changes", [False, True])
def test_a_certificate_whose_sources_change_while_it_is_made_is_not_valid(copy: Path, changes: bool) -> None:
    first = digest_of(TARGET)

    def run(check: Check) -> Verdict:
        if changes:
            (copy / "inflight_fsdp" / "new.py").touch()
        return PASSED.model_copy(update={"id": check.id, "level": check.level})

    kit = SimpleNamespace(
        target=WorkerTarget(factory=TARGET), facts={}, run=run, gone=None, is_over=False, start_seconds=0.0
    )
    made = run_suite(cast(Kit, kit), CHECKS[:2])
    assert made.sources == first
    assert made.conforms is not changes
    assert ("changed while the checks ran" in made.problem) is changes
