"""The site of docs/: `make site` builds it without a warning, and it works in a real browser without any other host."""

from __future__ import annotations

import functools
import importlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.sharing import made_once
from tests.unit.test_imports import PUBLIC_NAMES
from tests.watch.recorded import browser

ROOT = Path(__file__).parents[2]
PAGES = ("index", "configuration", "cli", "python-api-wire", "errors", "contract", "losses", "conformance", "trainers")
SIZES = {"desktop": {"width": 1280, "height": 900}, "phone": {"width": 390, "height": 844}}
DEADLINE_S = 150
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def build(*words: str, docs: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", *words]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    return subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(directory: Path) -> None:
        built = build("--site-dir", str(directory))
        assert built.returncode == 0, built.stderr

    return made_once(tmp_path_factory, "site", make)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.timeout(300)
def test_pages_fit_every_screen_and_ask_no_other_host(address: str) -> None:
    with browser() as chromium:
        for scheme, names, sizes in (
            ("light", PAGES, ("desktop", "phone")),  # loading takes long, and a loaded page adapts to another size
            ("dark", PAGES[:2], ("phone",)),
        ):
            context = chromium.new_context(viewport=SIZES[sizes[0]], color_scheme=scheme)
            page = context.new_page()
            errors, requests = listen(page)
            for name in names:
                page.set_viewport_size(SIZES[sizes[0]])
                page.goto(f"{address}/{name}.html")
                for size in sizes:
                    page.set_viewport_size(SIZES[size])
                    page.wait_for_function(f"innerWidth == {SIZES[size]['width']}")
                    assert page.evaluate(OVERFLOW) <= 0, f"{name} is too wide for a {size}"
            dark = page.get_attribute("body", "data-md-color-scheme")
            assert dark == ("slate" if scheme == "dark" else "default")
            assert errors == []
            assert {url for url in requests if not url.startswith((address, "data:", "blob:"))} == set()
            context.close()


def test_navigation_and_search_lead_to_a_page(address: str) -> None:
    with browser() as chromium:
        page = chromium.new_page(viewport=SIZES["desktop"])
        errors, _ = listen(page)
        page.goto(f"{address}/index.html")
        page.click(".md-tabs >> text=Reference")
        page.click(".md-sidebar--primary >> text=Command line")
        page.wait_for_selector("h1:has-text('Command line')")
        page.click("label[for=__search] >> nth=0") if page.is_hidden(".md-search__input") else None
        page.fill(".md-search__input", "checkpoint_every_steps")
        page.click(".md-search-result__link >> nth=0")
        page.wait_for_selector("h1:has-text('Configuration')")
        page.set_viewport_size(SIZES["phone"])
        page.click("label.md-header__button[for=__drawer]")
        page.wait_for_selector(".md-nav--primary >> text=Reference", state="visible")
        assert errors == []


def test_every_public_name_is_described_in_the_reference(site: Path) -> None:
    pages = [page.read_text() for page in site.glob("python-api*.html")]
    described = {id(found(anchor)) for page in pages for anchor in re.findall(r'id="(inflight[\w.]*)"', page)}
    missing = [
        f"{module}.{name}"
        for module, names in PUBLIC_NAMES.items()
        for name in names
        if name != "__version__" and id(getattr(importlib.import_module(module), name)) not in described
    ]
    assert missing == []


@pytest.mark.parametrize("fault", ["[a page](nowhere.md)", "[an anchor](install.md#nowhere)", "::: small.nothing"])
def test_a_link_anchor_or_reference_that_leads_nowhere_fails_the_build(tmp_path: Path, fault: str) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (tmp_path / "small.py").touch()  # all of inflight would be parsed first
    for name in ("index", "install"):
        (docs / f"{name}.md").write_text(f"# {name}\n\n{fault if name == 'index' else ''}\n")
    config = (ROOT / "mkdocs.yml").read_text().replace("docs_dir: docs", f"docs_dir: {docs}")
    config = re.sub(r"hooks: .*\n", "", config.partition("\nnav:")[0]).replace("paths: [src]", f"paths: [{tmp_path}]")
    config = re.sub(r"  - redirects:\n.*\n", "", config)
    (tmp_path / "mkdocs.yml").write_text(config)
    built = build("--config-file", str(tmp_path / "mkdocs.yml"), "--site-dir", str(tmp_path / "site"))
    assert built.returncode != 0
    assert "no" in built.stderr
    assert not fault.startswith(":::") or "small.nothing could not be found" in built.stderr


def listen(page: Any) -> tuple[list[str], list[str]]:
    """Return the errors and the requests of a page, as they come."""
    errors: list[str] = []
    requests: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: line.type == "error" and errors.append(line.text))
    page.on("request", lambda request: requests.append(request.url))
    return errors, requests


def found(path: str) -> object:
    """Return the object with a dotted path, None if it is something else's anchor."""
    module, _, rest = path, "", ""
    while module:
        try:
            value: Any = importlib.import_module(module)
            return functools.reduce(getattr, filter(None, rest.split(".")), value)
        except (ImportError, AttributeError):
            module, _, last = module.rpartition(".")
            rest = f"{last}.{rest}" if rest else last
    return None
