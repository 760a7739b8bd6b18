"""A stand-in of PipelineRL's server behind our adapter, for the kit."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from inflight.dialects.pipelinerl.endpoint import PipelineRlEndpoint, attach
from tests.dialects.programs import Program
from tests.gates import reserved_port


@contextlib.asynccontextmanager
async def start(model: Path) -> AsyncIterator[PipelineRlEndpoint]:
    told = {"model": str(model), "port": reserved_port(), "group_port": reserved_port()}
    with tempfile.TemporaryDirectory() as directory:
        program = Program(Path(directory) / "server.log", "tests.dialects.pipelinerl_server", json.dumps(told))
        try:
            url, group = f"http://127.0.0.1:{told['port']}", f"tcp://127.0.0.1:{told['group_port']}"
            yield attach(model, url=url, group=group, timeout_s=60, max_concurrent=8)
        finally:
            program.stop()
