"""``python -m benchmarks.gpu`` where there is no GPU: every section runs in tiny sizes, and what is missing is said."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import benchmarks.gpu.__main__ as command
import pytest
import torch
from benchmarks.gpu.distribution import write_metadata
from benchmarks.gpu.quickstart import CONFIG, changes_of
from benchmarks.gpu.settings import SECTIONS, Section, Settings
from benchmarks.gpu.tables import NONE_YET, page
from benchmarks.gpu.targets import kits_are_passed, targets_of
from benchmarks.results import DIRECTORY, read_results

from inflight.cli import main

pytestmark = [pytest.mark.usefixtures("forks"), pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]


def run(*words: str, path: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    inherited = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), *inherited])}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=800,
    )


@pytest.fixture(scope="module")
def record(forks: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the whole benchmark writes in tiny sizes on a CPU."""
    out = tmp_path_factory.mktemp("gpu") / "gpu.json"
    answer = run("--device", "cpu", "--quick", "--out", str(out))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def figures(record: dict[str, Any], name: str) -> Any:
    return record["rows"]["sections"][name]["figures"]


@pytest.mark.exhaustive
def test_every_section_runs_and_says_how_long_it_took(record: dict[str, Any]) -> None:
    sections = record["rows"]["sections"]
    assert list(sections) == [section.name for section in SECTIONS]
    for section in SECTIONS:
        assert 0 < sections[section.name]["seconds"] < sections[section.name]["limit_s"]
    assert figures(record, "machine")["packages"]["torch"] == record["versions"]["torch"]


@pytest.mark.exhaustive
def test_the_kits_ran_their_checks(record: dict[str, Any]) -> None:
    for name in ("endpoint", "worker"):
        found = figures(record, name)
        assert found["num_passed"] == found["num_checks"] > 0
        assert not found["failed"] and not found["not_run"]
    assert figures(record, "endpoint")["dtype"] == "bfloat16"


@pytest.mark.exhaustive
def test_every_head_that_is_installed_was_timed_and_is_right(record: dict[str, Any]) -> None:
    (shape,) = figures(record, "head")
    assert {"naive", "inflight, two passes", "inflight, one pass", "TRL", "verl"} <= shape["heads"].keys()
    timed = {name: row for name, row in shape["heads"].items() if "absent" not in row}
    assert {"naive", "inflight, two passes", "inflight, one pass"} <= timed.keys()
    for name, row in timed.items():
        assert row["seconds"]["least"] > 0 and row["num_rounds"] == 2, name
        assert row["largest_error"] < 0.05, name  # logits of 16 bits
    assert timed["inflight, two passes"]["peak_bytes"] > 0


@pytest.mark.exhaustive
def test_attention_agrees_with_torchs_kernels_one_by_one(record: dict[str, Any]) -> None:
    for shape in figures(record, "attention"):
        bound = 1e-5 if shape["dtype"] == "float32" else 0.05
        assert shape["kernels"]["inflight"]["largest_difference"] < bound
        assert shape["kernels"]["torch, one by one"]["seconds"]["median"] > 0
        assert "CUDA" in shape["kernels"]["flash-attn varlen"]["absent"]


@pytest.mark.exhaustive
def test_engine_and_generate_sampled_every_token(record: dict[str, Any]) -> None:
    loads = figures(record, "decode")["loads"]
    assert [load["lengths"] for load in loads] == ["equal", "log-normal"]
    for load in loads:
        for name in ("engine", "generate"):
            assert load["contenders"][name]["tokens_per_s"]["median"] > 0
        assert "GPU only" in load["contenders"]["generate, static cache, compiled"]["absent"]


@pytest.mark.exhaustive
def test_each_transport_published_beside_its_limit(record: dict[str, Any]) -> None:
    publishes = {row["transport"]: row for row in figures(record, "publish")["publishes"]}
    assert publishes["nccl"]["absent"] == "it needs CUDA"
    for name in ("shm", "gloo", "http", "file"):
        row = publishes[name]
        assert row["share_of_limit"] > 0 and row["paused_s"]["median"] > 0, row
        assert row["kept"]["without_per_s"] > 0 and row["kept"]["with_one_per_s"] > 0, row


@pytest.mark.exhaustive
def test_the_quickstart_took_its_steps_in_bfloat16(record: dict[str, Any]) -> None:
    found = figures(record, "quickstart")
    assert found["num_steps"] == 2
    assert found["step_s"]["median"] > 0 and found["publishes"][-1]["version"] == 2


@pytest.mark.parametrize(("num_gpus", "transport"), [(1, "ipc"), (2, "nccl")])
def test_the_quickstart_fits_on_gpus_by_the_dry_run(
    num_gpus: int,
    transport: str,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_metadata(tmp_path / "distribution")  # as the benchmark does, so that every transport is found
    monkeypatch.syspath_prepend(tmp_path / "distribution")
    settings = Settings("cuda", quick=False, place=tmp_path, deadline=0.0)
    changes = changes_of(settings, model_dir, tmp_path / "run", num_gpus)
    assert main(["train", str(CONFIG), *changes, "--dry-run", "--devices", f"{num_gpus}x80GiB"]) == 0
    assert transport in capsys.readouterr().out


@pytest.mark.exhaustive
def test_the_page_shows_every_section_of_a_full_run_on_a_gpu_and_of_no_other(record: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no figures of a GPU"):
        page(record)
    full = copy.deepcopy(record)
    full["rows"] |= {"device": "cuda", "quick": False}
    full["rows"]["sections"]["decode"] = {"seconds": 1.0, "limit_s": 2.0, "error": "RuntimeError: no"}
    text = page(full)
    assert text.count("\n### ") == len(SECTIONS) - 1
    assert "This section failed: RuntimeError: no" in text
    for line in text.splitlines():
        assert not line.startswith("|") or line.endswith("|")


def test_the_page_in_the_docs_is_that_of_the_results() -> None:
    text = page(read_results("gpu") if (DIRECTORY / "gpu.json").exists() else None)
    assert text in (ROOT / "docs" / "performance.md").read_text(), "run: make docs"
    assert text != NONE_YET or "make gpu" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_runs_and_one_sentence_says_so() -> None:
    answer = run()
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert answer.stderr.count("\n") == 1 and f"torch {torch.__version__} sees no GPU" in answer.stderr


def test_a_package_that_is_too_old_is_named_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "torch-1.2.dist-info").mkdir()
    (tmp_path / "torch-1.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.2\n")
    answer = run(path=(tmp_path,))
    assert answer.returncode == 2
    assert "torch>=" in answer.stderr and "(1.2 is installed)" in answer.stderr
    assert "transformers" not in answer.stderr


def test_a_section_that_fails_is_recorded_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        command, "SECTIONS", (Section("head", "head", "nothing", 0.01), Section("machine", "machine", "all", 60))
    )
    out = tmp_path / "gpu.json"
    assert command.main(["--device", "cpu", "--quick", "--out", str(out)]) == 1
    sections = json.loads(out.read_text())["rows"]["sections"]
    assert "its limit of 0.06 s was over" in sections["head"]["error"]
    assert "figures" in sections["machine"]
    assert "head: 0 s, FAILED" in capsys.readouterr().out


def test_all_sections_together_take_less_than_ten_minutes() -> None:
    assert sum(section.limit_s for section in SECTIONS) < 600


def test_targets_are_met_missed_or_not_measured() -> None:
    def timed(seconds: float, peak_bytes: int) -> dict[str, Any]:
        return {"seconds": {"median": seconds}, "peak_bytes": peak_bytes}

    def kit(**failed: str) -> dict[str, Any]:
        return {"figures": {"failed": failed, "not_run": [], "num_passed": 2, "num_checks": 2}}

    heads = {"inflight, two passes": timed(1.0, 10), "naive": timed(1.1, 99), "TRL": {"absent": "not installed"}}
    sections = {
        "endpoint": kit(),
        "worker": kit(W="it fails"),
        "head": {"figures": [{"model": "a", "heads": heads}, {"model": "b", "heads": heads | {"L": timed(0.9, 20)}}]},
        "publish": {
            "figures": {
                "publishes": [
                    {"transport": "ipc", "size_bytes": size, "total_s": {}, "share_of_limit": share, "paused_s": paused}
                    for size, share, paused in ((10**9, 0.9, {"median": 0.2}), (16 * 10**9, 0.7, {"median": 0.01}))
                ]
            }
        },
    }
    targets = targets_of({"sections": sections})
    met = [(target["section"], target["met"]) for target in targets]
    assert met == [
        ("endpoint", True),
        ("worker", False),
        ("head", True),
        ("head", False),
        ("publish", False),
        ("publish", True),
        ("decode", None),
    ]
    assert not kits_are_passed(targets)
