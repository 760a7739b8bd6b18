"""A stand-in of PipelineRL's server in fast-llm mode behind our adapter, for the kit."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from inflight.dialects.fast_llm.sending import attach
from inflight.dialects.pipelinerl.endpoint import PipelineRlEndpoint
from tests.dialects.programs import Program
from tests.dialects.redis_server import running_redis
from tests.gates import reserved_port


@contextlib.asynccontextmanager
async def start(model: Path) -> AsyncIterator[PipelineRlEndpoint]:
    told = {"model": str(model), "port": reserved_port(), "group_port": reserved_port()}
    with tempfile.TemporaryDirectory() as directory, running_redis(Path(directory) / "redis") as redis:
        words = ("tests.dialects.fast_llm_server", json.dumps(told | {"redis": redis}))
        program = Program(Path(directory) / "server.log", *words)
        try:
            url, group = f"http://127.0.0.1:{told['port']}", f"tcp://127.0.0.1:{told['group_port']}"
            yield attach(
                model, url=url, group=group, redis=f"redis://127.0.0.1:{redis}", timeout_s=60, max_concurrent=8
            )
        finally:
            program.stop()
