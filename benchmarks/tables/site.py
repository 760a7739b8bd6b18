"""Hooks of mkdocs: the site also has the files of the project that its pages link to.

A link to ``../examples/hello.py`` becomes one to a page with that file; the project's own pages, such as CHANGELOG.md,
become pages of the site.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
OWN_PAGES = ("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")
_LINK = re.compile(r"\]\(\.\./([^)#\s]+?)/?(#[^)\s]*)?\)")
_LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".sh": "sh"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file outside docs that a page links to."""
    for name in OWN_PAGES:
        text = re.sub(r"\]\((?!\w+:|#|docs/)", "](../", (ROOT / name).read_text()).replace("](docs/", "](")
        files.append(File.generated(config, name.lower(), content=text))
    linked = {link[1] for file in files.documentation_pages() for link in _LINK.finditer(file.content_string)}
    for name in sorted(linked - {"README.md", *OWN_PAGES}):
        files.append(File.generated(config, f"source/{name}.md", content=_page_of(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files outside docs to their pages."""

    def target(link: re.Match[str]) -> str:
        name, anchor = link[1], link[2] or ""
        if name == "README.md":
            return f"](index.md{anchor})"
        return f"]({name.lower() if name in OWN_PAGES else f'source/{name}.md'}{anchor})"

    return _LINK.sub(target, markdown)


def _page_of(path: Path) -> str:
    """Return a page with a file, or with the names in a folder."""
    title = f"# {path.relative_to(ROOT)}\n\n"
    if path.is_dir():
        return title + "\n".join(f"- `{it.relative_to(path)}`" for it in sorted(path.rglob("*")) if it.is_file())
    return f"{title}````{_LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n````"
