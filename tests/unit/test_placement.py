"""Which GPUs each process of a run gets, on machines that are described, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from inflight.errors import ConfigError
from inflight.run.config import RunConfig, load_config
from inflight.run.machines.devices import Device, described_devices, installed_devices, visible_devices
from inflight.run.machines.placement import Placement, place
from inflight_fsdp.devices import device_index

MINIMAL = '[run]\ndirectory = "runs/x"\n[model]\npath = "models/x"\n[task]\nname = "spell_backward"\n'


@pytest.fixture
def configured(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)

    def configure(*overrides: str) -> RunConfig:
        return load_config(path, overrides)

    return configure


def indices(placement: Placement) -> dict[str, list[int]]:
    return {it.name: [device.index for device in it.devices] for it in placement}


def gpus(num: int) -> tuple[Device, ...]:
    return described_devices(f"{num}x80GiB")


def fleet(*tables: str) -> tuple[str, str]:
    return "--servers.fleet", f"[{', '.join(tables)}]"


def test_trainers_come_first_and_servers_get_as_many_gpus_as_their_tensor_parallel_size(configured) -> None:
    config = configured(
        *("--train.num_ranks", "2"),
        *fleet(
            '{ engine = "vllm", count = 2, engine_arguments = ["--tensor-parallel-size", "2"] }',
            '{ engine = "sglang", engine_arguments = ["--tp=2"] }',
            "{ }",
        ),
    )
    assert indices(place(config, gpus(9))) == {
        "trainer-0": [0],
        "trainer-1": [1],
        "server-0-vllm": [2, 3],
        "server-1-vllm": [4, 5],
        "server-2-sglang": [6, 7],
        "server-3": [8],
    }


@pytest.mark.parametrize(
    ("engine", "arguments", "num"),
    [
        ("vllm", "[]", 1),
        ("vllm", '["-tp", "4"]', 4),
        ("vllm", '["--tensor_parallel_size=2", "--pipeline-parallel-size", "2"]', 4),
        ("vllm", '["-tp", "2", "-tp", "3"]', 3),
        ("sglang", '["--tp-size", "2", "--dp-size", "2"]', 4),
        ("sglang", '["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"]', 2),
    ],
)
def test_the_arguments_of_an_engine_say_how_many_gpus_it_runs_on(configured, engine, arguments, num) -> None:
    config = configured("--servers.engine", engine, "--servers.engine_arguments", arguments)
    (server,) = place(config, gpus(8)).servers
    assert [device.index for device in server.devices] == list(range(1, 1 + num))


def test_a_size_that_is_not_a_number_is_refused(configured) -> None:
    config = configured("--servers.engine", "vllm", "--servers.engine_arguments", '["--tensor-parallel-size", "two"]')
    with pytest.raises(ConfigError, match="'--tensor-parallel-size' requires a number, not 'two'"):
        place(config, gpus(8))


def test_without_gpus_nothing_is_placed_and_nothing_is_hidden(configured) -> None:
    placement = place(configured("--train.num_ranks", "2", "--servers.count", "2"), ())
    assert indices(placement) == {"trainer-0": [], "trainer-1": [], "server-0": [], "server-1": []}
    assert all(it.environment == {} for it in placement)


def test_what_computes_on_the_cpu_needs_no_gpu(configured) -> None:
    trainers_on_cpu = configured("--train.device", "cpu", "--servers.count", "2")
    assert indices(place(trainers_on_cpu, gpus(2))) == {"trainer-0": [], "server-0": [0], "server-1": [1]}
    servers_on_cpu = configured("--servers.device", "cpu", "--train.num_ranks", "2")
    assert indices(place(servers_on_cpu, gpus(2))) == {"trainer-0": [0], "trainer-1": [1], "server-0": []}


def test_configured_gpus_are_kept_free_for_those_they_were_given_to(configured) -> None:
    config = configured("--train.num_ranks", "2", "--servers.devices", "[0, 2]", "--servers.count", "2")
    assert indices(place(config, gpus(4))) == {
        "trainer-0": [1],
        "trainer-1": [3],
        "server-0": [0],
        "server-1": [2],
    }
    config = configured("--train.devices", "[3]", *fleet('{ engine = "vllm" }', '{ engine = "vllm", devices = [0] }'))
    assert indices(place(config, gpus(4))) == {"trainer-0": [3], "server-0-vllm": [1], "server-1-vllm": [0]}


def test_colocated_servers_start_again_at_the_first_gpu(configured) -> None:
    config = configured(
        *("--train.num_ranks", "4", "--servers.colocated", "true", "--servers.engine", "vllm", "--servers.count", "2"),
        *("--servers.engine_arguments", '["-tp=2"]', "--updates.transport", "shm"),
    )
    placement = place(config, gpus(4))
    assert indices(placement)["server-0-vllm"] == [0, 1]
    assert indices(placement)["server-1-vllm"] == [2, 3]


@pytest.mark.parametrize(
    ("overrides", "num", "expected"),
    [
        (
            ["--train.num_ranks", "4", "--servers.count", "5"],
            8,
            "the run needs 9 GPUs (4 for trainer ranks, 1 for server-0, 1 for server-1, 1 for server-2, 1 for "
            "server-3, 1 for server-4) but sees 8: lower train.num_ranks, servers.count",
        ),
        ([], 1, "the run needs 2 GPUs (1 for trainer ranks, 1 for server-0) but sees 1"),
        (["--train.num_ranks", "4", "--servers.colocated", "true"], 3, "the run needs 4 GPUs"),
        (["--train.devices", "[0, 0]", "--train.num_ranks", "2"], 4, "trainer-0 and trainer-1 share GPU 0, which NCCL"),
        (["--train.devices", "[0, 1]"], 4, "train.devices names 2 GPUs for 1 trainer ranks"),
        (["--train.devices", "[4]"], 4, "trainer-0 is assigned GPU 4, but the run sees 4"),
        (["--train.devices", "[0]", "--servers.devices", "[0]"], 4, "share GPU 0: name different GPUs, or set"),
        (["--servers.devices", "[1, 2]"], 4, "names 2 GPUs, but count 1 with 1 per server needs 1"),
        (["--servers.device", "cuda:1"], 4, "servers.device 'cuda:1' names one GPU for all servers"),
        (["--train.device", "cpu", "--train.devices", "[0]"], 4, "the trainers compute on 'cpu'"),
        (["--servers.device", "cpu", "--servers.devices", "[0]"], 4, "the servers compute on 'cpu'"),
        (["--train.devices", "[0]"], 0, "the configuration names GPUs for trainer-0, but this run sees none"),
        (["--servers.colocated", "true", "--updates.transport", "nccl"], 1, "'nccl' cannot send from a GPU to itself"),
        (
            ["--servers.engine", "vllm", "--servers.engine_arguments", '["-tp=2"]', "--servers.devices", "[1, 1]"],
            4,
            "GPU 1 is listed twice for server-0-vllm",
        ),
    ],
)
def test_a_placement_that_cannot_work_is_refused_with_what_to_change(configured, overrides, num, expected) -> None:
    with pytest.raises(ConfigError) as refused:
        place(configured(*overrides), gpus(num))
    assert expected in str(refused.value)


def test_a_weight_group_may_leave_out_a_shared_gpu(configured) -> None:
    """NCCL joins the servers and trainer 0 only: another trainer rank may share its GPU with a server."""
    shared = ("--train.devices", "[0, 1]", "--train.num_ranks", "2", "--servers.devices", "[1]")
    config = configured(*shared, "--servers.colocated", "true", "--updates.transport", "nccl")
    assert indices(place(config, gpus(2)))["server-0"] == [1]


# ------------------------------------------------------------------------------------------------ what a machine has


def test_children_see_their_own_gpus_in_the_words_that_the_run_was_started_with(configured) -> None:
    machine = tuple(Device(i, f"GPU-{i}{i}{i}{i}-abcd", 80 << 30) for i in range(8))
    config = configured("--servers.engine", "vllm", "--servers.engine_arguments", '["-tp=2"]')

    def seen(visible: str | None) -> list[str]:
        placement = place(config, visible_devices(machine, visible))
        return [it.environment["CUDA_VISIBLE_DEVICES"] for it in placement]

    assert seen(None) == ["0", "1,2"]
    assert seen("5,4,7") == ["5", "4,7"]
    assert seen("GPU-6666-abcd,GPU-2222,GPU-1") == ["GPU-6666-abcd", "GPU-2222,GPU-1"]
    assert seen("3, 2, 1, 9, 0") == ["3", "2,1"]  # as CUDA does, nothing after a GPU that is not there


def test_numbers_are_those_of_nvidia_smi(configured) -> None:
    assert place(configured(), gpus(2)).trainers[0].environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_hidden_gpus_are_not_used() -> None:
    assert visible_devices(gpus(4), "") == ()
    assert visible_devices(gpus(4), "-1") == ()
    assert visible_devices((), "GPU-1") == ()


def test_a_name_of_no_whole_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES names 'MIG-1', but .* whole GPUs only"):
        visible_devices(gpus(4), "MIG-1")


def test_devices_are_read_from_the_management_tool(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-aa, 81559'\necho '1, GPU-bb, [N/A]'\n")
    tool.chmod(0o755)
    assert installed_devices((str(tool),)) == (Device(0, "GPU-aa", 81559 << 20), Device(1, "GPU-bb", 0))
    tool.write_text("#!/bin/sh\necho 'something else'\n")
    with pytest.raises(ConfigError, match="'something else', which cannot be parsed"):
        installed_devices((str(tool),))


def test_a_machine_without_a_driver_has_no_gpus(tmp_path: Path) -> None:
    assert installed_devices((str(tmp_path / "nowhere"),)) == ()
    assert installed_devices((sys.executable, "-c", "raise SystemExit(9)")) == ()


def test_a_description_that_is_not_understood_is_refused() -> None:
    assert described_devices("2x24GB") == (Device(0, "GPU-0", 24 * 10**9), Device(1, "GPU-1", 24 * 10**9))
    with pytest.raises(ConfigError, match="write their number and memory, such as 8x80GiB"):
        described_devices("eight")


# ------------------------------------------------------------------------------------------------ inside the process


def test_ranks_that_would_share_a_gpu_are_refused_before_nccl_does() -> None:
    assert [device_index(rank, 2) for rank in range(2)] == [0, 1]
    with pytest.raises(ConfigError, match="LOCAL_RANK is 2, but torch sees 2 GPUs, so two ranks would share one"):
        device_index(2, 2)


def test_the_worker_is_told_where_to_compute(configured) -> None:
    from inflight.run.ranks.workers import worker_settings

    assert "device" not in worker_settings(configured())
    assert worker_settings(configured("--train.device", "cpu"))["device"] == "cpu"
