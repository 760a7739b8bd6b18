"""The digest of the sources that a certificate depends on: an unchanged adapter need not be certified again.

    python -m inflight.conformance.sources CERTIFICATE.json

ends with status 0 if the certificate conforms and was made with the sources that are installed, and else with 1. The
sources are the adapter's package and the parts of inflight that it works through and is checked with, as the syntax
trees of this release of Python: docstrings and comments do not count. The release of the engine and the file of
expected failures are not among them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from inflight.conformance.report.files import read_certificate
from inflight.conformance.verdicts import Certificate
from inflight.errors import ConfigError
from inflight.extensions import installed
from inflight.wire import PROTOCOL_VERSION

_INFLIGHT = Path(__file__).parents[1]
_ELSEWHERE = ("bench", "conformance/fleet", "conformance/report", "local", "pipeline", "rollouts")
"""Parts that adapters do not use, but for `_USED`."""
_USED = ("local/tiny.py", "rollouts/partials.py")
"""What the kit uses of them."""


def digest(target: str, implementation: str) -> str:
    """Return the SHA-256 of the sources behind a target that gives itself this name.

    Empty if the package is unknown, as behind the URL of a stranger's server.
    """
    package = _package(target, implementation)
    if package is None:
        return ""
    names = {f"{root.name}/{path.relative_to(root)}": path for root in (_INFLIGHT, package) for path in _files(root)}
    if package != _INFLIGHT:
        names = {name: path for name, path in names.items() if not _is_elsewhere(path)}
    found = hashlib.sha256()
    for name, path in sorted(names.items()):
        found.update(f"{name} {_code_digest(path.read_bytes())}\n".encode())
    return found.hexdigest()


def is_current(certificate: Certificate) -> bool:
    """Return whether a complete certificate conforms to this protocol version and was made with the installed
    sources."""
    is_good = certificate.conforms and not certificate.left_out and certificate.protocol_version == PROTOCOL_VERSION
    return is_good and certificate.sources == digest(certificate.target, certificate.implementation) != ""


def _package(target: str, implementation: str) -> Path | None:
    """Return the directory of an adapter's package, or the file of its module."""
    engines = {name: entry.value for name, entry in installed("engines").items()}
    reference = engines.get(implementation, target)
    if not re.fullmatch(r"[\w.]+:[\w.]+", reference):
        return None
    spec = find_spec(reference.partition(":")[0].partition(".")[0])
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)


def _files(root: Path) -> list[Path]:
    return [root] if root.is_file() else list(root.rglob("*.py"))


@functools.cache
def _code_digest(source: bytes) -> str:
    """Return the SHA-256 of a module's syntax tree without its docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [part for part in body if not _is_text(part)]  # type: ignore[attr-defined]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _is_text(part: ast.AST) -> bool:
    return isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) and isinstance(part.value.value, str)


def _is_elsewhere(path: Path) -> bool:
    name = path.relative_to(_INFLIGHT).as_posix() if path.is_relative_to(_INFLIGHT) else ""
    return name.startswith(tuple(f"{part}/" for part in _ELSEWHERE)) and name not in _USED


def main(path: Path) -> int:
    """Print whether a kept certificate holds for the installed sources; return the exit status."""
    try:
        holds = is_current(read_certificate(path))
    except ConfigError as error:
        print(error)
        return 1
    print(f"{path} {'was made with these sources' if holds else 'must be made again'}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
