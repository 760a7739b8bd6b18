"""Manifests of a run: what Slurm and Kubernetes would take, and a batch job whose tasks start on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inflight.cli import main
from inflight.errors import ConfigError
from inflight.http.server_spec import ServerSpec
from inflight.launchers.emit import jobset, sbatch
from inflight.launchers.plan import Gang, JobPlan
from inflight.run.config import load_config
from inflight.run.machines.manifests import plan_of
from inflight.run.machines.server_specs import server_spec
from tests.launchers.clusters import need_ray
from tests.run.runs import CONFIG, ROOT

OPTIONS_OF_SBATCH = {"job-name", "ntasks", "cpus-per-task", "gpus-per-task", "partition", "time", "account", "mem"}
"""Those of sbatch's long options that we emit, or that users add here; each takes a value."""


@pytest.fixture
def config_file(tmp_path: Path, model_dir: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(directory=tmp_path / "run", model=model_dir))
    return path


def emitted(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", *words]) == 0
    return capsys.readouterr().out


FLEET = '[{ engine = "embedded", count = 3 }, { engine = "vllm", engine_arguments = ["--tensor-parallel-size", "2"] }]'


def test_a_batch_job_has_a_part_for_the_controller_the_trainers_and_each_kind_of_server(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--train.num_ranks", "4", "--servers.fleet", FLEET, "--option=--partition=gpu"]
    script = emitted(capsys, str(config_file), "--emit", "sbatch", *words)
    directives = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    parts: list[dict[str, str]] = [{}]
    for directive in directives:
        if directive == "hetjob":
            parts.append({})
            continue
        found = re.fullmatch(r"--([a-z-]+)=(\S+)", directive)
        assert found is not None and found[1] in OPTIONS_OF_SBATCH, directive
        parts[-1][found[1]] = found[2]
    assert [part["ntasks"] for part in parts] == ["1", "4", "3", "1"]
    assert [part.get("gpus-per-task") for part in parts] == [None, "1", "1", "2"]
    assert {part["partition"] for part in parts} == {"gpu"}
    assert script.index("#SBATCH") < script.index("set -euo pipefail") < script.index("srun")
    assert re.findall(r"srun --het-group=(\d)", script) == ["1", "2", "3", "0"]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=20)


CONTAINER = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "image", "command"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
        "image": {"type": "string"},
        "command": {"type": "array", "items": {"type": "string"}},
        "workingDir": {"type": "string"},
        "env": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name"],
                "properties": {"name": {"type": "string"}, "value": {"type": "string"}, "valueFrom": {}},
            },
        },
        "resources": {"type": "object", "additionalProperties": False, "properties": {"requests": {}, "limits": {}}},
        "volumeMounts": {"type": "array"},
    },
}
JOB = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "parallelism": {"type": "integer"},
        "completions": {"type": "integer"},
        "completionMode": {"enum": ["Indexed", "NonIndexed"]},
        "backoffLimit": {"type": "integer"},
        "template": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "spec": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["containers", "restartPolicy"],
                    "properties": {
                        "restartPolicy": {"enum": ["Never", "OnFailure"]},
                        "containers": {"type": "array", "minItems": 1, "items": CONTAINER},
                        "volumes": {"type": "array"},
                    },
                }
            },
        },
    },
}
JOBSET = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
        "kind": {"const": "JobSet"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["replicatedJobs"],
            "properties": {
                "network": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "enableDNSHostnames": {"type": "boolean"},
                        "subdomain": {"type": "string"},
                        "publishNotReadyAddresses": {"type": "boolean"},
                    },
                },
                "successPolicy": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"operator": {"enum": ["All", "Any"]}, "targetReplicatedJobs": {"type": "array"}},
                },
                "failurePolicy": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"maxRestarts": {"type": "integer"}},
                },
                "replicatedJobs": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["name", "template"],
                        "properties": {
                            "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
                            "replicas": {"type": "integer"},
                            "template": {
                                "type": "object",
                                "additionalProperties": False,
                                "properties": {"spec": JOB},
                            },
                        },
                    },
                },
            },
        },
    },
}
"""The part of JobSet's API that we emit, written after its documentation."""


def test_a_jobset_is_what_the_api_takes_and_every_process_finds_the_controller(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need_ray()  # jsonschema lies beside it
    import jsonschema

    words = ["--train.num_ranks", "4", "--servers.fleet", FLEET, "--image", "registry/inflight:1"]
    document = json.loads(emitted(capsys, str(config_file), "--emit", "jobset", "--volume", "data:/shared", *words))
    jsonschema.Draft202012Validator(JOBSET).validate(document)
    jobs: dict[str, Any] = {job["name"]: job["template"]["spec"] for job in document["spec"]["replicatedJobs"]}
    assert {name: job["parallelism"] for name, job in jobs.items()} == {
        "controller": 1, "trainers": 4, "servers-0": 3, "servers-1": 1
    }  # fmt: skip
    (ranks,) = jobs["trainers"]["template"]["spec"]["containers"]
    environment = {it["name"]: it.get("value") for it in ranks["env"]}
    assert (environment["INFLIGHT_RUN"], environment["WORLD_SIZE"]) == ("run-controller-0-0.run:8101", "4")
    (server,) = jobs["servers-1"]["template"]["spec"]["containers"]
    assert "http://run-controller-0-0.run:8100" in server["command"]
    assert server["resources"]["limits"] == {"cpu": 1, "nvidia.com/gpu": 2}


def test_an_emitted_server_has_the_settings_of_one_that_the_run_starts_itself(config_file: Path) -> None:
    words = ["--servers.drafts", "history", "--servers.threads", "3", "--servers.max_concurrent", "8"]
    config = load_config(config_file, [*words, "--servers.lease_s", "0"])
    (_, gang) = plan_of(config, config_file).gangs
    spec = ServerSpec.from_argv(gang.command[2:])
    own = server_spec(config, config.servers.started[0])
    assert (spec.options, spec.engine, spec.process) == (own.options, own.engine, own.process)
    assert (spec.options.drafts, spec.options.threads, spec.options.max_concurrent) == ("history", 3, 8)
    assert (spec.joining.join, spec.listen.port) == ("http://{head}:8100", 0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--servers.attach.urls", '["http://a:1"]'], "leave out servers.attach.urls"),
        (["--updates.transport", "shm"], "need servers and trainers on one machine"),
    ],
)
def test_what_only_one_machine_has_is_not_emitted(config_file: Path, words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_of(load_config(config_file, words), config_file)


@pytest.mark.parametrize(
    ("words", "says"), [([], "a JobSet needs --image"), (["--image", "x", "--volume", "data"], "is not CLAIM:PATH")]
)
def test_a_jobset_without_what_it_needs_is_refused(
    config_file: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert main(["launch", str(config_file), "--emit", "jobset", *words]) == 1
    assert says in capsys.readouterr().err


def test_a_name_that_kubernetes_cannot_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="'_1' contains no letter"):
        jobset(JobPlan("_1", Gang("controller", 1, [], 1, 0), ()), "image", None)


FAKE_SRUN = """#!{python}
import os, re, signal, subprocess, sys
group = int(next(word for word in sys.argv if word.startswith("--het-group=")).partition("=")[2])
num = [int(n) for n in re.findall(r"ntasks=(\\\\d+)", open({script!r}).read())][group]
command = sys.argv[sys.argv.index("bash"):]
tasks = [
    subprocess.Popen(command, env={{**os.environ, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}}) for i in range(num)
]
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_an_emitted_batch_job_trains_where_its_tasks_start_on_this_machine(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu = ["--train.device", "cpu", "--servers.device", "cpu", "--train.num_ranks", "2", "--servers.count", "2"]
    script, bin_ = tmp_path / "job.sh", tmp_path / "bin"
    script.write_text(emitted(capsys, str(config_file), "--emit", "sbatch", *cpu, "--run.num_steps", "3"))
    bin_.mkdir()
    programs = {
        "srun": FAKE_SRUN.format(python=sys.executable, script=str(script)).replace("\\\\d", "\\d"),
        "scontrol": "#!/bin/bash\necho 127.0.0.1\n",
        "hostname": "#!/bin/bash\necho 127.0.0.1\n",
        "python": f'#!/bin/bash\nexec {sys.executable} "$@"\n',
        "inflight": f'#!/bin/bash\nexec {sys.executable} -m inflight "$@"\n',
    }
    for name, text in programs.items():
        (bin_ / name).write_text(text)
        (bin_ / name).chmod(0o755)
    path = {"PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    slurm = {"SLURM_JOB_NODELIST_HET_GROUP_0": "here"}
    log = tmp_path / "output.log"
    with log.open("wb") as output:
        job = subprocess.Popen(
            ["bash", str(script)],
            env={**os.environ, **path, **slurm},
            cwd=ROOT,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        assert job.wait(500) == 0, log.read_text()
        rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(row)["version"] for row in rows] == [1, 2, 3]
        assert len(json.loads(rows[-1])["publish"]["outcomes"]) == 2
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


@pytest.mark.parametrize("directory", ["a\ntouch /tmp/owned\n#", "a b", "$(id)"])
def test_a_name_or_an_option_never_becomes_a_line_of_the_script(
    config_file: Path, capsys: pytest.CaptureFixture[str], directory: str
) -> None:
    plan = JobPlan(directory, Gang("controller", 1, ["inflight"], 1, 0), ())
    assert re.fullmatch(r"#SBATCH --job-name=[\w.-]+", sbatch(plan).splitlines()[1])
    with pytest.raises(ConfigError, match="contains a control character"):
        sbatch(plan, [f"--comment={directory}\n"])
    assert main(["launch", str(config_file), "--emit", "sbatch", "--run.directory", f"{directory}\n"]) == 1
    assert "run.directory: a path may not contain the control character '\\n'" in capsys.readouterr().err
