"""The digest of the sources that a certificate depends on. While it is unchanged, no new certificate is needed.

    python -m inflight.conformance.sources CERTIFICATE.json

exits with status 0 if the certificate conforms and was made with the installed sources, and with status 1 otherwise.

The sources are the adapter's package, and the modules of inflight that this package and the checks of its kind import,
directly or indirectly. They enter the digest as syntax trees of this Python release, so docstrings and comments do not
count. The release of the engine and the file of expected failures are not included.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from inflight.base.extensions import find_entry_points
from inflight.conformance.report.files import read_certificate
from inflight.conformance.verdicts import Certificate
from inflight.errors import ConfigError
from inflight.wire import PROTOCOL_VERSION

_INFLIGHT = Path(__file__).parents[1]
_KINDS = {"endpoint", "transport", "worker"}
_OF_ALL = ("inflight.conformance.suite", "inflight.weights.transports.installed")
"""Modules from which imports are followed for every kind: one that runs checks, and one that entry points refer to."""
_OF_ENDPOINTS = ("inflight.engines.serving",)
"""Modules from which imports are also followed for endpoints: the one that ``inflight serve --engine`` runs."""
_NOT_FOLLOWED = ("inflight", "inflight.conformance.sources")
"""Modules that are not included: of the first, only the version is used, and the second affects no verdict."""


class _Module(NamedTuple):
    digest: str
    """SHA-256 of the module's syntax tree without docstrings."""
    imports: tuple[tuple[str, str], ...]
    """Imports at run time, each as a module and a name; the name is empty if the module itself is imported."""


def digest(kind: str, target: str, implementation: str) -> str:
    """Return the SHA-256 of the source code of a target, in hexadecimal.

    ``kind`` is the kind of the target, and ``implementation`` is the name of its implementation.

    The result is empty if the package is unknown, for example if the target is the URL of another project's server.
    """
    package = _package(target, implementation)
    if package is None:
        return ""
    files = {path: f"{package.name}/{path.relative_to(package)}" for path in _files(package)}
    if package != _INFLIGHT:
        found = _follow_imports(
            {*files, *_beginning(kind)}, {_INFLIGHT / "conformance" / other for other in _KINDS - {kind}}
        )
        files |= {path: f"inflight/{path.relative_to(_INFLIGHT)}" for path in found - files.keys()}
    whole = hashlib.sha256()
    for path, name in sorted(files.items(), key=lambda item: item[1]):
        whole.update(f"{name} {_module(path.read_bytes()).digest}\n".encode())
    return whole.hexdigest()


def is_current(certificate: Certificate) -> bool:
    """Return whether a certificate is complete, conforms to this protocol version, and was made with the installed
    sources."""
    is_good = certificate.conforms and not certificate.left_out and certificate.protocol_version == PROTOCOL_VERSION
    return (
        is_good
        and certificate.sources == digest(certificate.kind, certificate.target, certificate.implementation) != ""
    )


def _package(target: str, implementation: str) -> Path | None:
    """Return the directory of the adapter's package, the file of a single module, or None if it is unknown."""
    engines = {name: entry.value for name, entry in find_entry_points("engines").items()}
    reference = engines.get(implementation, target)
    if not re.fullmatch(r"[\w.]+:[\w.]+", reference):
        return None
    spec = find_spec(reference.partition(":")[0].partition(".")[0])
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)


def _files(root: Path) -> list[Path]:
    return [root] if root.is_file() else list(root.rglob("*.py"))


def _beginning(kind: str) -> list[Path]:
    names = (f"inflight.conformance.{kind}.catalogue", *_OF_ALL, *(_OF_ENDPOINTS if kind == "endpoint" else ()))
    return [path for name in names if (path := _file(name)) is not None]


def _follow_imports(begin: set[Path], others: set[Path]) -> set[Path]:
    """Return these files and those of inflight that they import, directly or indirectly.

    ``others`` are the directories with the checks of other kinds. Imports from them by modules that all kinds share are
    not followed.
    """
    found, left = set(begin), list(begin)
    while left:
        path = left.pop()
        for module, name in _module(path.read_bytes()).imports:
            target = None if module in _NOT_FOLLOWED else _resolve_import(module, name)
            is_of_another_kind = target is not None and target.parent in others and path.parent == target.parents[1]
            if target is not None and target not in found and not is_of_another_kind:
                found.add(target)
                left.append(target)
    return found


def _resolve_import(module: str, name: str) -> Path | None:
    """Return the file that defines ``name``, even if ``module`` only re-exports it.

    The result is None for modules outside inflight.
    """
    path = _file(f"{module}.{name}") if name else None
    if path is not None or (path := _file(module)) is None or path.name != "__init__.py":
        return path
    for other, bound in _module(path.read_bytes()).imports:
        if bound == name and (target := _resolve_import(other, bound)) is not None:
            return target
    return path


def _file(module: str) -> Path | None:
    """Return the file of a module of inflight, or None if there is no such module."""
    first, *others = module.split(".")
    path = _INFLIGHT.joinpath(*others)
    candidates = (path.with_suffix(".py"), path / "__init__.py") if first == "inflight" else ()
    return next((file for file in candidates if file.is_file()), None)


@functools.cache
def _module(source: bytes) -> _Module:
    tree = ast.parse(source)
    imports: list[tuple[str, str]] = []
    for node in _runtime_nodes(tree):
        if isinstance(node, ast.Import):
            imports += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            imports += [(node.module, alias.name) for alias in node.names]
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [part for part in body if not _is_text(part)]  # type: ignore[attr-defined]
    return _Module(hashlib.sha256(ast.dump(tree).encode()).hexdigest(), tuple(imports))


def _runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a syntax tree, except those under ``if TYPE_CHECKING``."""
    for part in ast.iter_child_nodes(node):
        if not (isinstance(part, ast.If) and isinstance(part.test, ast.Name) and part.test.id == "TYPE_CHECKING"):
            yield part
            yield from _runtime_nodes(part)


def _is_text(part: ast.AST) -> bool:
    return isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) and isinstance(part.value.value, str)


def main(path: Path) -> int:
    """Print whether `is_current` is true for the certificate in a file, and return the exit status."""
    try:
        holds = is_current(read_certificate(path))
    except ConfigError as error:
        print(error)
        return 1
    print(f"{path} {'was made with these sources' if holds else 'is out of date: certify again'}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
