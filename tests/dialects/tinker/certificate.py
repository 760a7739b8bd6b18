"""Certifies a release of Tinker's SDK: ``python -m tests.dialects.tinker.certificate JUNIT.xml OUTPUT_DIR``.

Reads what ``make test-tinker`` wrote for a build server, and states for each public method whether its test passed.
Exits with status 1 if one did not.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

from inflight import __version__
from tests.dialects.tinker.sdk_methods import METHODS, REFUSED, SDK_VERSION


def outcomes(junit: Path) -> dict[str, bool]:
    """Return for each test function whether all its cases ran and passed."""
    found: dict[str, bool] = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        name = case.attrib["name"].partition("[")[0]
        found[name] = found.get(name, True) and not {"failure", "error", "skipped"} & {part.tag for part in case}
    return found


def main() -> int:
    junit, directory = Path(sys.argv[1]), Path(sys.argv[2])
    passed = outcomes(junit)
    methods = {
        method: {"test": test, "is_refused": method in REFUSED, "passed": passed.get(test, False)}
        for method, test in METHODS.items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    certificate = {
        "sdk": SDK_VERSION,
        "inflight": __version__,
        "certified_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "num_tests": len(passed),
        "methods": methods,
    }
    (directory / f"{SDK_VERSION}.json").write_text(json.dumps(certificate, indent=1) + "\n")
    failed = [method for method, it in methods.items() if not it["passed"]]
    print(f"tinker {SDK_VERSION}: the tests of {len(methods) - len(failed)} of {len(methods)} methods passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
