"""What the documentation shows is what is executed elsewhere, and what it links to exists."""

from __future__ import annotations

import functools
import json
import re
import shlex
import subprocess
import textwrap
import tomllib
from pathlib import Path

import pytest

from inflight.base.described_settings import describe_sections
from inflight.http.openapi import openapi_document
from inflight.observe.trace.schema import json_schema
from inflight.planning.plan import load_plan
from inflight.run.config import RunConfig, load_config
from tests.zygote import python

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FOLDERS = ("examples", "tests/conformance/plain")
RUN = (ROOT / "src" / "inflight" / "run" / "run.py").read_text()
EXAMPLES = [RUN, *(path.read_text() for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py")))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_in_the_docs_is_part_of_an_example_that_a_test_executes(page: Path) -> None:
    for block in blocks(page, "python"):
        assert any(textwrap.dedent(block) in textwrap.dedent(text) or block in text for text in EXAMPLES), block


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_docs_are_understood(page: Path) -> None:
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line)
            if words[:2] == ["inflight", "train"]:
                flags = ("--resume", "--dry-run", "--json", "dry-run.json", "--devices", "8x80GiB")
                overrides = [word for word in words[3:] if word not in flags]
                load_config(ROOT / words[2], overrides)
            elif words[:1] == ["make"]:
                assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
            elif words[:1] == ["inflight"]:
                command = [
                    word
                    for word in words[1:3]
                    if word
                    in ("check", "endpoint", "worker", "transport", "fleet", "parity", "import", "slime", "verl")
                    or (words[1] == "dialect" and "://" not in word)
                ]
                answer = help_of(*(command or words[1:2]))
                flags = [word.partition("=")[0] for word in words if word.startswith("--")]
                assert answer.returncode == 0
                assert all(flag in answer.stdout for flag in flags), line


@functools.cache
def help_of(*command: str) -> subprocess.CompletedProcess[str]:
    words = [python(), "-m", "inflight", *command, "--help"]
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_in_the_docs_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        if "://" not in target:
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name} links to {target}"
            is_generated = anchor.startswith("inflight.")  # from a docstring, when the site is built
            assert not anchor or is_generated or anchor in anchors(file), f"{page.name} links to {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    documented = re.findall(r"^::: (.+)$", page.read_text(), re.MULTILINE)
    return {*documented} | {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_loop_in_the_design_is_that_of_the_run() -> None:
    (loop,) = re.findall(r"# The loop\n\n\n(.*?)\n\n\n# -", RUN, re.DOTALL)
    assert loop + "\n" in blocks(ROOT / "docs" / "design.md", "python"), "quote it from run/run.py"


def test_openapi_document_is_current() -> None:
    checked_in = json.loads((ROOT / "docs" / "openapi.json").read_text())
    assert checked_in == json.loads(json.dumps(openapi_document())), "run: make docs"


def test_the_schema_of_events_in_docs_is_that_of_the_models() -> None:
    checked_in = json.loads((ROOT / "docs" / "events.schema.json").read_text())
    assert checked_in == json.loads(json.dumps(json_schema())), "run: make docs"


def test_the_reference_of_the_commands_shows_the_values_of_defaults() -> None:
    assert "%(" not in (ROOT / "docs" / "cli.md").read_text()


@pytest.mark.parametrize("page", ["configuration", "cli", "errors", "http", "metrics", "loss-presets", "events"])
def test_every_entry_of_the_reference_has_a_meaning(page: str) -> None:
    rows = re.findall(r"^\| `.*\|$", (ROOT / "docs" / f"{page}.md").read_text(), re.MULTILINE)
    assert len(rows) > 10
    column = 1 if page == "http" else 3 if page == "loss-presets" else -1
    for row in rows:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        assert cells[column], row


@pytest.mark.parametrize("number", range(3))
def test_configurations_of_the_migration_page_are_valid(tmp_path: Path, number: int) -> None:
    file = tmp_path / "run.toml"
    file.write_text(blocks(ROOT / "docs" / "migrating.md", "toml")[number])
    assert load_config(file).loss.policy_loss()


def test_settings_that_the_migration_page_names_exist() -> None:
    known = {f"{section.key}.{field.name}" for section in describe_sections(RunConfig) for field in section.fields}
    known |= {section.key for section in describe_sections(RunConfig)}
    tables = re.findall(r"^\| .* \| (.*) \|$", (ROOT / "docs" / "migrating.md").read_text(), re.MULTILINE)
    named = {name for cell in tables for name in re.findall(r"`(\w+\.[\w.]+)", cell)}
    assert len(named) > 20
    assert named <= known, named - known


def test_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    source = re.sub(r'"\n\s*f?"', "", source)
    page = (ROOT / "docs" / "faq.md").read_text().partition("## Error messages")[2].partition("## Symptoms")[0]
    messages = re.findall(r"^### `(.*)`$", page, re.MULTILINE)
    assert len(messages) > 8
    for message in messages:
        pieces = re.split(r"\.\.\.|'[^']*'|/\w+|\d+", message)  # what varies
        long = [piece.strip() for piece in pieces if len(piece.strip()) > 9]
        assert long, message
        for piece in long:
            assert piece in source, f"no message of the code has {piece!r}"


def test_every_example_configuration_is_valid() -> None:
    for path in (ROOT / "examples").glob("*.toml"):
        load = load_plan if path.name == "plan.toml" else load_config
        assert load(path).model_dump()
        assert tomllib.loads(path.read_text())
