"""The digest of the sources that a certificate depends on: an adapter that is as it was need not be certified again.

    python -m inflight.conformance.sources CERTIFICATE.json

ends with status 0 if the certificate conforms and was made with the sources that are installed, and else with 1. The
sources are the adapter's package and what of inflight it works through and is checked with. The release of the engine
and the file of expected failures are not among them.
"""

from __future__ import annotations

import hashlib
import re
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from inflight.conformance.report.files import read_certificate
from inflight.conformance.verdicts import Certificate
from inflight.errors import ConfigError
from inflight.wire import CONTRACT_EDITION

_INFLIGHT = Path(__file__).parents[1]
_ELSEWHERE = ("bench", "conformance/chaos", "conformance/report", "local", "pipeline", "rollouts")
"""What no adapter comes to; of ``local``, the kit takes the tiny models that it makes."""


def digest(target: str, implementation: str) -> str:
    """Return the SHA-256 of the sources behind a target of the kit that gave itself this name.

    Empty if it is not known which package they are in, as behind the URL of a stranger's server.
    """
    package = _package(target, implementation)
    if package is None:
        return ""
    names = {f"{root.name}/{path.relative_to(root)}": path for root in (_INFLIGHT, package) for path in _files(root)}
    if package != _INFLIGHT:
        names = {name: path for name, path in names.items() if not _is_elsewhere(path)}
    found = hashlib.sha256()
    for name, path in sorted(names.items()):
        found.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()


def is_current(certificate: Certificate) -> bool:
    """Return whether a whole certificate conforms to this edition and was made with the sources that are installed."""
    is_good = certificate.conforms and not certificate.left_out and certificate.edition == CONTRACT_EDITION
    return is_good and certificate.sources == digest(certificate.target, certificate.implementation) != ""


def _package(target: str, implementation: str) -> Path | None:
    """Return where the package, or the module, of an adapter lies."""
    engines = {entry.name: entry.value for entry in entry_points(group="inflight.engines")}
    reference = engines.get(implementation, target)
    if not re.fullmatch(r"[\w.]+:[\w.]+", reference):
        return None
    spec = find_spec(reference.partition(":")[0].partition(".")[0])
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)


def _files(root: Path) -> list[Path]:
    return [root] if root.is_file() else list(root.rglob("*.py"))


def _is_elsewhere(path: Path) -> bool:
    return path.name != "tiny.py" and any(path.is_relative_to(_INFLIGHT / part) for part in _ELSEWHERE)


def main(path: Path) -> int:
    """Say whether a kept certificate holds for the sources that are installed; returns the exit status."""
    try:
        holds = is_current(read_certificate(path))
    except ConfigError as error:
        print(error)
        return 1
    print(f"{path} {'was made with these sources' if holds else 'is to be made anew'}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
