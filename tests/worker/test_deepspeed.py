"""The DeepSpeed worker against the FSDP worker: numbers, checkpoints of each other, and a build that was killed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import inflight_fsdp
from inflight.conformance.checks import Check
from inflight.conformance.kit import Kit
from inflight.conformance.targets import WorkerTarget
from inflight.conformance.verdicts import CheckOutcome
from inflight.conformance.worker.catalogue import CHECKS
from inflight.errors import ConfigError
from inflight_fsdp.config import parse_config
from inflight_fsdp.deepspeed import DeepSpeedConfig
from tests.models import make_model
from tests.worker.ranks import apart, run_ranks
from tests.worker.worker_cases import settings
from tests.worker.zero_program import ADAM

APART = {**apart("deepspeed"), "TORCHDYNAMO_DISABLE": "1"}
"""Without a compiler, which the worker does not use: DeepSpeed imports it for a second per process."""
ALL_SHARDED = {"stage3_param_persistence_threshold": 0}
"""DeepSpeed leaves parameters of fewer than 100,000 elements whole: all of a test's."""
CASES: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "stage 2": {"zero_stage": 2},
    "stage 3": {"zero_stage": 3, "zero_options": ALL_SHARDED},
    "fsdp in bfloat16": {"dtype": "bfloat16", "wire_dtype": "bfloat16"},
    "stage 3 in bfloat16, in host memory": {
        "zero_stage": 3,
        "zero_options": ALL_SHARDED,
        "dtype": "bfloat16",
        "wire_dtype": "bfloat16",
        "cpu_offload": True,
    },
}
MORE_CASES: dict[str, dict[str, Any]] = CASES | {
    "stage 1": {"zero_stage": 1},
    "stage 1, in host memory": {"zero_stage": 1, "cpu_offload": True},
    "stage 2, in host memory": {"zero_stage": 2, "cpu_offload": True},
    "stage 3, small parameters whole": {"zero_stage": 3},
    "stage 3, in host memory": {"zero_stage": 3, "cpu_offload": True},
    "stage 3, layers computed again": {"zero_stage": 3, "activation_checkpointing": True, "zero_options": ALL_SHARDED},
    "stage 1 in bfloat16": {"zero_stage": 1, "dtype": "bfloat16", "wire_dtype": "bfloat16"},
    "stage 2 in bfloat16": {"zero_stage": 2, "dtype": "bfloat16", "wire_dtype": "bfloat16"},
    "stage 3 in bfloat16": {"zero_stage": 3, "dtype": "bfloat16", "wire_dtype": "bfloat16"},
}


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE_CASES, marks=pytest.mark.exhaustive)], ids=["few", "all"])
def test_ranks_train_and_resume_as_fsdp_does_whatever_was_left_by_a_killed_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cases: dict[str, dict[str, Any]]
) -> None:
    """Each on one rank and on two; ranks have unequal shares, or nothing."""
    built = tmp_path / "built"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(built))
    lock = built / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    make_model(tmp_path / "model", vocab_size=259, tokenizer=False)
    alone = cases if cases is MORE_CASES else {name: it for name, it in cases.items() if "dtype" not in it}
    for num_ranks, run in ((1, alone), (2, cases)):
        (tmp_path / "cases.json").write_text(json.dumps(run))
        run_ranks(tmp_path, "zero_program", num_ranks, deadline_s=170, environment=APART)
    assert [file for file in built.rglob("*") if file.is_file()] == [lock]
    for name, options in cases.items():
        narrow = options.get("dtype") == "bfloat16"
        for num_ranks in (1, 2) if name in alone else (2,):
            compare(tmp_path, f"{name}, {num_ranks}", f"fsdp{' in bfloat16' if narrow else ''}, {num_ranks}", narrow)
        if not narrow:
            compare(tmp_path, f"{name}, 2", f"{name}, 1", narrow)
    # Each trainer, on one rank, resumes what the other saved on two.
    worker = inflight_fsdp.create_worker(
        {**settings(tmp_path / "model", **ADAM), "dtype": "float32", "wire_dtype": "float32"}
    )
    for name in ("stage 2, 2", "stage 3, 2"):
        worker.load(tmp_path / name)
        assert worker.version == 5
        worker.save(tmp_path / "again")
        for file in ("model.safetensors", "trainer/optimizer.safetensors"):
            found, saved = load_file(tmp_path / "again" / file), load_file(tmp_path / name / file)
            assert found.keys() == saved.keys()
            assert all(torch.equal(found[key], saved[key]) for key in saved)
    worker.close()


def compare(directory: Path, ours: str, theirs: str, narrow: bool) -> None:
    """Assert that two runs of the program have the same numbers, up to rounding."""
    found, expected = (json.loads((directory / f"{name}.json").read_text()) for name in (ours, theirs))
    assert found["refused"][0] == expected["refused"][0] == "NonFiniteError"
    # bfloat16 has 8 bits, and Adam divides by small numbers.
    assert found["logprobs"] == pytest.approx(expected["logprobs"], abs=0.2 if narrow else 1e-5)
    for norms in ("norms", "resumed"):
        assert found[norms] == pytest.approx(expected[norms], rel=0.1 if narrow else 1e-3)
    for checkpoint in ("", " resumed"):
        weights, others = (
            load_file(directory / f"{name}{checkpoint}" / "model.safetensors") for name in (ours, theirs)
        )
        assert weights.keys() == others.keys()
        apart_by = max(float((weights[key] - others[key]).abs().max()) for key in weights)
        assert apart_by < (0.02 if narrow else 1e-4), (ours, theirs, checkpoint)


SOME = {"W-05", "W-16", "W-19", "W-25", "W-29", "W-42", "W-44"}
"""What needs no other number of ranks, for which the kit starts processes again."""


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(
    ("stage", "num_ranks", "asked"),
    [
        (3, 2, SOME),
        *(
            pytest.param(stage, num_ranks, {check.id for check in CHECKS}, marks=pytest.mark.exhaustive)
            for stage in (1, 2, 3)
            for num_ranks in (1, 2)
        ),
    ],
    ids=lambda it: f"{len(it)} checks" if isinstance(it, set) else str(it),
)
def test_the_worker_conforms(monkeypatch: pytest.MonkeyPatch, stage: int, num_ranks: int, asked: set[str]) -> None:
    for name, value in APART.items():
        monkeypatch.setenv(name, value)
    options = {"device": "cpu", "zero_stage": stage, "zero_options": ALL_SHARDED}
    target = WorkerTarget(factory="inflight_fsdp:DEEPSPEED", num_ranks=num_ranks, options=options)
    checks: list[Check] = [check for check in CHECKS if check.id in asked]
    with Kit(target, deadline_scale=2.0) as kit:
        verdicts = [kit.run(check) for check in checks]
    wrong = [str(it) for it in verdicts if it.outcome not in (CheckOutcome.PASSED, CheckOutcome.SKIPPED)]
    assert wrong == []
    assert num_ranks == 1 or all(it.outcome is CheckOutcome.PASSED for it in verdicts)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float64"}, "the DeepSpeed worker computes in float32 or bfloat16"),
        ({"master_dtype": "bfloat16", "dtype": "bfloat16"}, "keeps its weights in float32"),
        ({"compile": True}, "compile is not a setting of the DeepSpeed worker"),
        ({"frozen": ["*"]}, "frozen is not a setting"),
        ({"shard_size": 2}, "shard_size is not a setting"),
        ({"lora": {"rank": 2, "alpha": 4, "targets": ["q_proj"]}}, "lora is not a setting"),
        ({"zero_stage": 0}, r"zero_stage: Input should be 1, 2 or 3"),
        ({"stage": 2}, "unknown key 'stage'; did you mean zero_stage"),
    ],
)
def test_settings_that_deepspeed_does_not_have_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config({"model_path": "model", **options}, DeepSpeedConfig)


def test_without_deepspeed_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from inflight_fsdp.deepspeed import create_worker

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ConfigError, match=r"needs deepspeed .*No module named 'deepspeed'.*docs/trainers.md"):
        create_worker({"model_path": str(tmp_path), "device": "cpu"})
    assert "LOCAL_RANK" not in os.environ  # with which other trainers would take this process for one of a group
