"""Certificates as files, pages, badges and terminal text: what goes in comes out, and nothing breaks the form."""

from __future__ import annotations

import io
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from inflight.base.json_files import check_writable
from inflight.conformance.checks import Check
from inflight.conformance.report.files import (
    REPORTS,
    badge_json,
    certificate_json,
    read_certificate,
    write_reports,
)
from inflight.conformance.report.junit import junit_xml
from inflight.conformance.report.page import html_page
from inflight.conformance.report.summary import time_spent
from inflight.conformance.report.terminal import print_certificate, progress
from inflight.conformance.report.text import printable
from inflight.conformance.verdicts import Certificate, CheckOutcome, Verdict
from inflight.errors import ConfigError
from tests.conformance.certificates import (
    EVERYTHING,
    EXPECTED,
    FAILED,
    HUNG,
    PASSED,
    SKIPPED,
    certificate,
    verdict,
)

CERTIFICATES_KEPT = Path(__file__).parents[2] / "docs" / "certificates"
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
FACTS = st.dictionaries(TEXT, st.one_of(TEXT, st.integers(), st.booleans(), st.none(), st.lists(TEXT)), max_size=3)
VERDICTS = st.builds(
    Verdict,
    id=TEXT,
    level=TEXT,
    requirement=TEXT,
    outcome=st.sampled_from(CheckOutcome),
    seconds=st.floats(0, 1e6),
    message=TEXT,
    evidence=FACTS,
    look_at=TEXT,
    stacks=TEXT,
    expected=TEXT,
)
CERTIFICATES = st.builds(
    lambda verdicts, name, problem, flags, facts, left_out: certificate(
        *verdicts, implementation=name, problem=problem, flags=flags, capabilities=facts, left_out=left_out
    ),
    st.lists(VERDICTS, max_size=4),
    TEXT,
    TEXT,
    st.dictionaries(TEXT, TEXT, max_size=2),
    FACTS,
    st.lists(TEXT, max_size=2),
)


def printed(subject: Certificate, **console: object) -> str:
    text = io.StringIO()
    options = {"width": 100, "highlight": False, "markup": False, "emoji": False, "soft_wrap": True, **console}
    print_certificate(Console(file=text, **options), subject)  # type: ignore[arg-type]
    return text.getvalue()


# ---------------------------------------------------------------------------------------------------------------
# Any certificate


@given(CERTIFICATES)
def test_any_certificate_can_be_written_in_every_form(subject: Certificate) -> None:
    assert Certificate.model_validate_json(certificate_json(subject)) == subject
    assert ElementTree.fromstring(junit_xml(subject).partition("\n")[2]).tag == "testsuites"
    assert set(json.loads(badge_json(subject))) == {"schemaVersion", "label", "message", "color"}
    assert html_page(subject).endswith("</html>\n")
    assert "\x1b" not in printed(subject)


@given(st.text())
def test_printable_text_holds_nothing_that_xml_or_a_terminal_trips_over(text: str) -> None:
    shown = printable(text)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", shown)
    ElementTree.fromstring(ElementTree.tostring(_element(shown)))


def _element(text: str) -> ElementTree.Element:
    element = ElementTree.Element("text", text=text)
    element.text = text
    return element


# ---------------------------------------------------------------------------------------------------------------
# Files


def test_a_certificate_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_reports(EVERYTHING, {"json": tmp_path / "certificate.json"})
    assert read_certificate(tmp_path / "certificate.json") == EVERYTHING


def test_paths_in_the_working_directory_are_written_relative_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = f'File "{tmp_path}/engine/server.py" of {tmp_path}/engine, not /other{tmp_path}/engine'
    write_reports(
        certificate(verdict("E-01", CheckOutcome.FAILED, message=message)), {"json": tmp_path / "certificate.json"}
    )
    (kept,) = read_certificate(tmp_path / "certificate.json").verdicts
    assert kept.message == f'File "engine/server.py" of engine, not /other{tmp_path}/engine'


def test_no_kept_certificate_names_a_directory_of_the_machine_that_made_it() -> None:
    for file in CERTIFICATES_KEPT.glob("*.json"):
        assert not re.search(r"(?<![\w.-])/[\w./-]*/\.(engines|venv)/", file.read_text()), file.name


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"", "EOF"),
        (b"{}", "key 'kit_version' is missing"),
        (b"\xff\xfe", "is not a certificate"),
        (b"[" * 100_000, "is not a certificate"),
        (certificate_json(EVERYTHING).replace('"hung"', '"maybe"').encode(), r"verdicts\.2\.outcome"),
        (certificate_json(EVERYTHING).replace('"kind"', '"king"').encode(), "key 'kind' is missing"),
    ],
)
def test_what_is_no_certificate_is_refused_with_the_file(tmp_path: Path, text: bytes, complaint: str) -> None:
    file = tmp_path / "certificate.json"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_certificate(file)
    assert str(file) in str(caught.value)


def test_a_missing_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.json.*No such file"):
        read_certificate(tmp_path / "missing.json")


def test_every_report_is_written_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    files = {report.name: tmp_path / f"certificate.{report.name}" for report in REPORTS}
    check_writable(files)
    write_reports(EVERYTHING, files)
    assert sorted(tmp_path.iterdir()) == sorted(files.values())
    assert all(files[report.name].read_text() == report.render(EVERYTHING) for report in REPORTS)


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "kept").touch()
    with pytest.raises(ConfigError, match=r"taken.*cannot be written"):
        write_reports(EVERYTHING, {"json": tmp_path / "taken"})
    with pytest.raises(ConfigError, match=r"absent.*cannot be written"):
        write_reports(EVERYTHING, {"json": tmp_path / "absent" / "file"})
    assert [file.name for file in tmp_path.rglob("*")] == ["taken", "kept"]


def test_files_that_cannot_be_written_are_refused_beforehand(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--json .*absent.*does not exist"):
        check_writable({"json": tmp_path / "absent" / "certificate.json"})
    with pytest.raises(ConfigError, match=r"--html .*is a directory"):
        check_writable({"html": tmp_path})
    with pytest.raises(ConfigError, match=r"--json .*--html names the same file"):
        check_writable({"json": tmp_path / "certificate", "html": tmp_path / "certificate"})
    if os.geteuid() != 0:  # root may write anywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(ConfigError, match="no permission to write to its directory"):
            check_writable({"badge": tmp_path / "closed" / "badge.json"})


# ---------------------------------------------------------------------------------------------------------------
# JUnit


def test_junit_has_a_suite_per_level_and_says_what_each_check_came_to() -> None:
    root = ElementTree.fromstring(junit_xml(EVERYTHING).partition("\n")[2])
    assert [suite.attrib["name"] for suite in root] == ["tokens", "updates"]
    counts = {name: root.attrib[name] for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "6", "failures": "2", "errors": "1", "skipped": "2"}
    cases = {case.attrib["name"].partition(" ")[0]: case for case in root.iter("testcase")}
    results = {id: [child.tag for child in case if child.tag != "system-out"] for id, case in cases.items()}
    assert results == {
        "E-01": [],
        "E-02": ["failure"],
        "U-01": ["error"],
        "U-02": ["skipped"],
        "U-03": ["skipped"],
        "U-04": ["failure"],
    }
    assert cases["U-03"].find("skipped").attrib["message"] == "expected failure: issue 31"  # type: ignore[union-attr]
    assert HUNG.stacks in (cases["U-01"].findtext("error") or "")
    assert "look at: the sampler's temperature" in (cases["E-02"].findtext("failure") or "")
    assert "largest_difference: 0.25" in (cases["E-02"].findtext("system-out") or "")


def test_junit_has_an_error_for_a_run_that_ended_early() -> None:
    root = ElementTree.fromstring(junit_xml(certificate(PASSED, problem="it is gone")).partition("\n")[2])
    assert root.attrib["errors"] == "1" and root.attrib["tests"] == "2"
    assert [error.attrib["message"] for error in root.iter("error")] == ["it is gone"]


# ---------------------------------------------------------------------------------------------------------------
# The page


class Page(HTMLParser):
    """Collects what a browser would see, and checks that tags are closed in order."""

    VOID = ("meta", "link", "br", "img", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@given(CERTIFICATES)
def test_nothing_in_a_certificate_becomes_part_of_the_page(subject: Certificate) -> None:
    page = Page(html_page(subject))
    assert page.addresses == []
    assert not {"script", "img", "link", "iframe"} & set(page.tags)


def test_the_page_escapes_evidence_and_keeps_it_readable() -> None:
    text = html_page(EVERYTHING)
    assert "&lt;b&gt;bold&lt;/b&gt; &amp; " in text and "<b>bold" not in text
    page = Page(text)
    for words in ("tiny", "2.0", "protocol version 2", "3 of 8 logprobs differ", "File <stdin>", "issue 31", "0.25"):
        assert words in page.text
    assert not re.search(r"url\(|@import|https?://(?!127\.0\.0\.1)", text)


def test_the_page_unfolds_what_keeps_it_from_conforming() -> None:
    assert html_page(certificate(PASSED, FAILED)).count('<details class="check" open>') == 1
    assert html_page(certificate(PASSED, EXPECTED)).count(" open>") == 0


# ---------------------------------------------------------------------------------------------------------------
# The badge


@pytest.mark.parametrize(
    ("subject", "message", "color"),
    [
        (certificate(PASSED), "protocol version 2: 1 of 1", "brightgreen"),
        (certificate(PASSED, SKIPPED), "protocol version 2: 1 of 1", "brightgreen"),
        (certificate(PASSED, EXPECTED), "protocol version 2: 1 of 2", "yellowgreen"),
        (certificate(PASSED, left_out=("E-02", "E-03")), "protocol version 2: 1 of 1, 2 left out", "lightgrey"),
        (EVERYTHING, "protocol version 2: 2 of 5", "red"),
        (certificate(PASSED, problem="gone"), "protocol version 2: 1 of 1", "red"),
        (certificate(SKIPPED), "protocol version 2: 0 of 0", "red"),
    ],
)
def test_the_badge_is_what_shields_asks_for(subject: Certificate, message: str, color: str) -> None:
    assert json.loads(badge_json(subject)) == {
        "schemaVersion": 1,
        "label": "inflight contract",
        "message": message,
        "color": color,
    }


# ---------------------------------------------------------------------------------------------------------------
# The terminal


def test_the_terminal_says_what_to_look_at_and_where_the_time_went() -> None:
    text = printed(EVERYTHING)
    for words in (
        "3 of 8 logprobs differ",
        "largest_difference: 0.25",
        "the sampler's temperature",
        "File <stdin>",
        "issue 32",
        "1 passed  1 failed  1 hung  1 skipped  1 expected failure  1 unexpected pass",
        "does not conform to protocol version 2: 2 of 5 checks hold",
        "where the time went, 10.00 s in all",
        "starting and restoring",
    ):
        assert words in text
    assert "lease lost" not in text, "an expected failure is nothing to look at"


def test_a_run_that_left_checks_out_or_ended_early_says_so() -> None:
    text = printed(certificate(PASSED, left_out=("E-02",), problem="before E-03: it is gone"))
    assert "conforms, as far as it was checked, to protocol version 2" in printed(
        certificate(PASSED, left_out=("E-02",))
    )
    assert "1 check was left out" in text and "not valid: before E-03: it is gone" in text


@given(st.lists(VERDICTS, max_size=4), st.floats(0, 1e6), st.floats(0, 1e3))
def test_the_time_spent_adds_up(verdicts: list[Verdict], start_seconds: float, rest: float) -> None:
    seconds = sum(verdict.seconds for verdict in verdicts) + start_seconds + rest
    spent = time_spent(certificate(*verdicts, seconds=seconds, start_seconds=start_seconds))
    assert sum(part for _, part in spent) == pytest.approx(seconds, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_verdicts_are_printed_as_they_come(is_terminal: bool) -> None:
    text = io.StringIO()
    checks = [Check(id, "tokens", f"{id} holds", "nowhere", print) for id in ("E-01", "E-02")]
    console = Console(file=text, force_terminal=is_terminal, width=60, highlight=False, markup=False, soft_wrap=True)
    with progress(console, checks) as on_verdict:
        on_verdict(PASSED)
        assert "E-01" in text.getvalue()
        on_verdict(verdict("E-02", CheckOutcome.SKIPPED, message="not supported: " + "x" * 200))
    lines = text.getvalue().splitlines()
    if is_terminal:
        assert "2 of 2" in text.getvalue() and "x" * 60 not in text.getvalue()
    else:
        assert lines[:2] == ["tokens", "  E-01  passed             0.25 s  E-01 holds"]
        assert lines[2].startswith("  E-02  skipped ") and "x" * 200 in lines[2]
