"""``inflight train --dry-run``: what it prints of described machines, what it refuses, and that it does nothing."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inflight.cli import main
from tests.headers import LLAMA_70B, QWEN2_7B, QWEN3_8B, write_headers
from tests.servers import ServerProcess

ROOT = Path(__file__).parents[2]
QWEN2_14B = QWEN2_7B | {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
}
GIB = 1 << 30


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of which only the headers exist, by the names of the examples."""
    directory = tmp_path_factory.mktemp("models")
    known = {"Qwen2.5-7B": QWEN2_7B, "Qwen2.5-14B": QWEN2_14B, "Qwen3-8B": QWEN3_8B, "Llama-70B": LLAMA_70B}
    return {name: write_headers(directory / name, config) for name, config in known.items()}


@pytest.fixture
def dry_run(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.chdir(tmp_path)

    def run(
        example: str, *arguments: str, model: str = "Qwen2.5-7B", json_file: Path | None = None
    ) -> tuple[int, str, str]:
        path = ROOT / "examples" / f"{example}.toml"
        into = [] if json_file is None else ["--json", str(json_file)]
        status = main(["train", str(path), "--dry-run", "--model.path", str(models[model]), *arguments, *into])
        assert list(tmp_path.iterdir()) == []  # nothing was written
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def json_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("json") / "dry-run.json"


def test_the_split_layout_fits_eight_gpus(dry_run: Callable[..., tuple[int, str, str]], json_file: Path) -> None:
    status, _, _ = dry_run("gpus-split", "--devices", "8x80GiB", json_file=json_file)
    assert status == 0
    plan = json.loads(json_file.read_text())
    placed = {it["name"]: it["devices"] for it in plan["processes"] if it["devices"]}
    assert placed == {f"trainer-{i}": [i] for i in range(4)} | {f"server-{i}-vllm": [4 + i] for i in range(4)}
    size_bytes = plan["update"]["size_bytes"]
    assert size_bytes == 2 * 7_615_616_512
    assert plan["update"]["deadline_s"] == 60 + size_bytes / 0.5e9
    assert [use["index"] for use in plan["devices"]] == list(range(8))
    assert all(0.3 * 80 * GIB < use["needed_bytes"] < 80 * GIB for use in plan["devices"])
    (staged,) = [term for term in plan["processes"][-1]["memory"] if term["name"] == "staged update"]
    assert staged["size_bytes"] == size_bytes


def test_the_colocated_layout_shares_every_gpu(dry_run: Callable[..., tuple[int, str, str]], json_file: Path) -> None:
    status, _, _ = dry_run("gpus-colocated", "--devices", "8x80GiB", json_file=json_file)
    assert status == 0
    uses = json.loads(json_file.read_text())["devices"]
    assert [use["processes"] for use in uses] == [[f"trainer-{i}", f"server-{i}-vllm"] for i in range(8)]
    assert all(use["needed_bytes"] < use["memory_bytes"] for use in uses)


def test_a_colocated_layout_that_needs_the_engine_to_give_up_its_memory_is_refused(
    dry_run: Callable[..., tuple[int, str, str]],
) -> None:
    arguments = '["--gpu-memory-utilization", "0.9"]'
    status, printed, said = dry_run("gpus-colocated", "--devices", "8x80GiB", "--servers.engine_arguments", arguments)
    assert (status, printed) == (1, "")
    assert re.search(r"GPU 0 is estimated to need \d+\.\d GiB but has 80\.0 GiB, \d+\.\d GiB too little", said)
    assert "set run.mode = 'conventional' and servers.release_memory = true, so that they take turns" in said


def test_servers_that_release_their_memory_need_it_only_while_they_sample(
    dry_run: Callable[..., tuple[int, str, str]], json_file: Path
) -> None:
    status, _, _ = dry_run("gpus-turns", "--devices", "8x80GiB", json_file=json_file)
    assert status == 0
    plan = json.loads(json_file.read_text())
    memory = {it["name"]: it["memory"] for it in plan["processes"]}
    terms = [*memory["trainer-0"], *memory["server-0-vllm"]]
    always = ["parameters", "optimizer states", "context", "context"]
    assert [term["name"] for term in terms if term["phase"] is None] == always
    needed = {
        phase: sum(term["size_bytes"] for term in terms if term["phase"] in (None, phase))
        for phase in ("training", "sampling")
    }
    assert needed["training"] < needed["sampling"] < 80 * GIB < sum(term["size_bytes"] for term in terms)
    assert {(use["phase"], use["needed_bytes"]) for use in plan["devices"]} == {("sampling", needed["sampling"])}
    status, _, said = dry_run("gpus-turns", "--devices", "8x80GiB", "--servers.release_memory", "false")
    assert status == 1
    assert "GPU 0 is estimated to need" in said
    status, _, said = dry_run("gpus-turns", "--devices", "8x48GiB")
    assert status == 1
    assert "while sampling but has 48.0 GiB" in said
    assert "so that they take turns" not in said


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--run.mode", "pipeline"], "servers.release_memory needs run.mode 'conventional'"),
        (["--servers.device", "cpu"], "server-0-vllm computes on the CPU, but vllm can release only GPU memory"),
        (["--updates.transport", "ipc", "--updates.delta", "true"], "updates.delta over 'ipc' keeps a copy"),
    ],
)
def test_memory_is_not_released_where_it_is_needed_or_cannot_be(
    dry_run: Callable[..., tuple[int, str, str]], overrides: list[str], expected: str
) -> None:
    status, printed, said = dry_run("gpus-turns", "--devices", "8x80GiB", *overrides)
    assert (status, printed) == (1, "")
    assert expected in said


def test_two_nodes_need_an_address_that_the_other_one_reaches(dry_run: Callable[..., tuple[int, str, str]]) -> None:
    here = ("--devices", "8x80GiB")
    status, printed, _ = dry_run("gpus-two-nodes", *here, model="Qwen2.5-14B")
    assert status == 0
    for url in ("http://203.0.113.2:8000", "http://203.0.113.2:8001"):
        assert f"{url} cannot take part now" in printed  # there is no such machine here
    status, _, said = dry_run("gpus-two-nodes", *here, "--updates.address", "127.0.0.1", model="Qwen2.5-14B")
    assert status == 1
    assert "http://203.0.113.2:8000 is on another machine" in said
    assert "set updates.address" in said
    status, _, said = dry_run("gpus-two-nodes", *here, "--updates.transport", "shm", model="Qwen2.5-14B")
    assert status == 1
    assert "choose 'gloo', 'nccl', 'http' or 'file'" in said


@pytest.mark.parametrize(
    ("example", "model"),
    [
        ("gpus-split", "Qwen2.5-7B"),
        ("gpus-colocated", "Qwen2.5-7B"),
        ("gpus-turns", "Qwen2.5-7B"),
        ("gpus-two-nodes", "Qwen2.5-14B"),
        ("gpu-recipe", "Qwen3-8B"),
    ],
)
def test_the_page_shows_what_the_command_prints(
    dry_run: Callable[..., tuple[int, str, str]], example: str, model: str
) -> None:
    _, printed, _ = dry_run(example, "--devices", "8x80GiB", model=model)
    page = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("gpus", "gpu-recipe"))
    (shown,) = re.findall(rf"<!-- dry run: {example} -->\n```\n(.*?)```\n<!-- end -->", page, re.DOTALL)
    assert shown == printed[printed.index("one update:") :]


def test_what_does_not_fit_is_refused_with_how_much_is_missing_and_what_to_change(
    dry_run: Callable[..., tuple[int, str, str]],
) -> None:
    status, printed, said = dry_run("gpus-split", "--devices", "8x80GiB", model="Llama-70B")
    assert (status, printed) == (1, "")
    assert "the vllm servers fill 0.75 of each GPU, 60.0 GiB, but weights (131.4 GiB)" in said
    assert "raise the engine's tensor-parallel size" in said
    more = ("--servers.count", "1", "--servers.engine_arguments", '["-tp", "4", "--max-model-len", "8192"]')
    status, _, said = dry_run("gpus-split", "--devices", "8x80GiB", *more, model="Llama-70B")
    assert status == 1
    # Parameters, gradients and two moments in float32 take 16 bytes each, of a quarter of the 70.6 B parameters.
    assert "GPU 0 is estimated to need" in said
    assert "optimizer states 131.4 GiB" in said
    assert "raise train.num_ranks" in said


def test_too_few_gpus_are_counted(dry_run: Callable[..., tuple[int, str, str]]) -> None:
    status, _, said = dry_run("gpus-split", "--devices", "7x80GiB")
    assert status == 1
    assert "the run needs 8 GPUs (4 for trainer ranks, 1 for server-0-vllm" in said
    assert "but sees 7" in said


@pytest.mark.parametrize("num_gib", [64, 512])
def test_a_machine_without_gpus_gets_a_plan_too(
    dry_run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, num_gib: int
) -> None:
    system = {"SC_PHYS_PAGES": num_gib << 18, "SC_PAGE_SIZE": 4096}
    real = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: system[name] if name in system else real(name))
    status, printed, _ = dry_run("quickstart", "--devices", "0x80GiB")
    assert status == 0
    assert "trainer-0: fsdp worker, rank 0 of 1; no GPU" in printed
    assert "every process computes on the CPU" in printed
    each = {name: float(size) for name, size in re.findall(r"^  (\S+): ([\d.]+) GiB(?: \(|$)", printed, re.M)}
    assert set(each) == {"controller", "trainer-0", "server-0"}
    (together,) = re.findall(rf"this host: ([\d.]+) GiB of {num_gib}\.0 GiB", printed)
    assert float(together) == pytest.approx(sum(each.values()), abs=0.2)
    elements = 7.6e9  # of Qwen2.5-7B: parameters, gradients and two moments in float32
    assert each["trainer-0"] * GIB > 16 * elements and each["server-0"] * GIB > 4 * elements
    assert ("too little" in printed) == (float(together) > num_gib)


def test_memory_of_unknown_workers_is_left_out_and_said_to_be(dry_run: Callable[..., tuple[int, str, str]]) -> None:
    trainer = ("--train.trainer", "tests.conformance.plain.worker:KIND")
    status, printed, _ = dry_run("gpus-split", "--devices", "8x80GiB", *trainer)
    assert status == 0
    assert "memory of 'tests.conformance.plain.worker:KIND' workers is unknown" in printed


def test_a_running_server_is_asked_whether_it_can_take_part(
    dry_run: Callable[..., tuple[int, str, str]],
    shared_server: ServerProcess,
    model_dir: Path,
) -> None:
    urls = ("--servers.attach.urls", json.dumps([shared_server.url]), "--devices", "0x80GiB")
    status, printed, _ = dry_run("quickstart", *urls)
    assert status == 0
    assert "it serves tiny with 258: start the server" in printed
    fitting = ("--model.path", str(model_dir))
    status, printed, _ = dry_run("quickstart", *urls, *fitting)
    assert status == 0
    assert f"{shared_server.url} is ready and runs up to" in printed


def test_teachers_are_listed_and_those_on_servers_are_asked_whether_they_can_score(
    dry_run: Callable[..., tuple[int, str, str]], shared_server: ServerProcess, model_dir: Path
) -> None:
    def with_teacher(teacher: str, *more: str) -> str:
        taught = ("--loss.preset", "opd", "--distillation.teachers", f"[{{{teacher}}}]", "--devices", "0x80GiB")
        status, printed, said = dry_run("quickstart", *taught, "--model.path", str(model_dir), *more)
        assert status == 0, said
        return printed

    short = ("--sampling.max_tokens", "32", "--train.max_tokens_per_micro_batch", "96")
    assert f"{shared_server.url} is ready and scores up to 8 completions at a time" in with_teacher(
        f'url = "{shared_server.url}"', *short
    )
    assert "http://127.0.0.1:1: teacher; no GPU; http://127.0.0.1:1 cannot take part now" in with_teacher(
        'url = "http://127.0.0.1:1"'
    )
    assert f"rank 0 of 1, which also loads teacher '{model_dir}'" in with_teacher(f'path = "{model_dir}"', *short)


@pytest.mark.parametrize("arguments", [("--json", "FILE"), ("--devices", "8x80GiB")])
def test_options_of_the_dry_run_do_not_start_a_run(capsys: pytest.CaptureFixture[str], arguments: Any) -> None:
    assert main(["train", str(ROOT / "examples" / "quickstart.toml"), *arguments]) == 1
    assert "--json and --devices apply only to --dry-run" in capsys.readouterr().err
