"""Engines for tests of what starts engines: the embedded engine behind its own server, and some that fail.

`installed` makes them known to child processes under the names of `KINDS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from inflight.contracts import EngineKind, EngineOptions, InferenceEndpoint
from inflight.http.client import HttpEndpoint
from inflight.http.tokens import TOKEN_VARIABLE

ROOT = Path(__file__).parents[2]
ENGINE_TOKEN = "token-of-the-engine"


@dataclass(frozen=True)
class FakeKind(EngineKind):
    """A program of its own, or the embedded engine where there is none."""

    name: str = "fake"
    program: str = ""
    liveness_path: str | None = None

    def command(self, options: EngineOptions, host: str, port: int) -> list[str]:
        if self.program:
            return ["-c", self.program, str(port), *options.arguments]
        command = ["-m", "inflight", "serve", str(options.model), "--host", host, "--port", str(port)]
        return [*command, "--name", options.name or "", "--threads", "1", *options.arguments]

    def environment(self, options: EngineOptions) -> Mapping[str, str]:
        return {"OF_THE_KIND": "yes"} if self.program else {TOKEN_VARIABLE: ENGINE_TOKEN}

    def connect(
        self, url: str, *, token: str | None, control_timeout_s: float, generate_timeout_s: float
    ) -> InferenceEndpoint:
        return HttpEndpoint(
            url,
            token=token or ENGINE_TOKEN,
            control_timeout_s=control_timeout_s,
            generate_timeout_s=generate_timeout_s,
        )


PARTED = """
import subprocess, sys
from inflight.cli import main
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
further = "import subprocess, time; subprocess.Popen({!r}); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", further.format(sleep)])
sys.argv[0] = "inflight"
_, port, model = sys.argv
main(["serve", model, "--host", "127.0.0.1", "--port", port, "--name", "parted", "--threads", "1"])
"""


@dataclass(frozen=True)
class PartedKind(FakeKind):
    """The embedded engine as a server that has a child, which has one, too; nothing is asked of either."""

    def command(self, options: EngineOptions, host: str, port: int) -> list[str]:
        return ["-c", PARTED, str(port), str(options.model)]

    def environment(self, options: EngineOptions) -> Mapping[str, str]:
        return {TOKEN_VARIABLE: ENGINE_TOKEN}


EMBEDDED = FakeKind("fake")
PARTS = PartedKind("parted")
SILENT = FakeKind("silent", "import time; print('loading for ever', flush=True); time.sleep(600)")
FAILING = FakeKind("failing", "import sys; print('the engine knows no such model', flush=True); sys.exit(3)")


def installed(directory: Path, *kinds: str) -> str:
    """Write what an installer would; returns the PYTHONPATH with which these kinds are found by their names."""
    metadata = directory / "fake_engines-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-engines\nVersion: 1.0\n")
    known = {"fake": "EMBEDDED", "parted": "PARTS", "silent": "SILENT", "failing": "FAILING"}
    lines = [f"{kind} = tests.engines.fake_engines:{known[kind]}" for kind in kinds or known]
    (metadata / "entry_points.txt").write_text("\n".join(["[inflight.engines]", *lines, ""]))
    return f"{directory}:{ROOT / 'src'}:{ROOT}"
