"""Real engines as teachers of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real_engines.servers import python_of
from tests.run.runs import RunProcess
from tests.servers import TOKEN, ServerProcess

LOSS = '{gate = {kind = "score"}, distillation = {}, penalties = [{kind = "teacher_kl", coefficient = 1.0}]}'
"""Uses the logprobs of the sampled tokens, and those of the teacher's likeliest ones."""


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_model_on_an_engine_is_at_no_distance_from_itself(engine: str, tiny_model: Path, tmp_path: Path) -> None:
    words = ["--engine", engine, "--python", python_of(engine), "--dtype", "float32", "--start-timeout", "900"]
    server = ServerProcess(tiny_model, tmp_path / "server", *words)
    try:
        server.wait_until_ready(900.0)
        run = RunProcess(
            tmp_path,
            tiny_model,
            *("--distillation.teachers", f'[{{url = "{server.url}"}}]', "--distillation.top_k", "8"),
            *("--loss.policy", LOSS, "--run.num_steps", "2"),
            environment={"INFLIGHT_TOKEN": TOKEN},
        )
        assert run.wait(300) == 0, run.output()
        first = next(row for row in run.rows() if row["kind"] == "step")
        assert abs(first["teacher_kl_k1"]) < 1e-5  # of float32 logprobs that other kernels sum in another order
        assert 0 < first["teacher_top_k_mass"] <= 1
        assert first["teacher_top_k_mass"] == pytest.approx(first["student_top_k_mass"], abs=1e-5)
    finally:
        server.end()
