"""Writes the manifest of a job: a Slurm batch script or a Kubernetes JobSet. No process is started or contacted."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from inflight.errors import ConfigError
from inflight.launchers.plan import MEET_PORT, Gang, JobPlan


def sbatch(plan: JobPlan, directives: Sequence[str] = ()) -> str:
    """Return the script of a heterogeneous batch job, with one component for the controller and one for each gang.

    ``directives`` are additional options for every component, such as ``--partition=gpu``. Raises `ConfigError` if one
    of them is not a single line.
    """
    if unusable := [option for option in directives if not option.isprintable()]:
        raise ConfigError(
            f"option {unusable[0]!r} contains a control character, which would begin a line of the script"
        )
    lines = ["#!/bin/bash"]
    for index, gang in enumerate((plan.controller, *plan.gangs)):
        lines += ["#SBATCH hetjob"] if index else [f"#SBATCH --job-name={re.sub(r'[^A-Za-z0-9_.-]+', '-', plan.name)}"]
        lines += [f"#SBATCH {option}" for option in (*_options(gang), *directives)]
    lines += [
        "",
        "set -euo pipefail",
        'export INFLIGHT_TOKEN="${INFLIGHT_TOKEN:-$(head -c 24 /dev/urandom | base64 | tr "+/" "-_")}"',
        'export INFLIGHT_HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0" | head -n 1)"',
        f'export INFLIGHT_RUN="$INFLIGHT_HEAD:{MEET_PORT}"',
        "",
    ]
    for index, gang in enumerate(plan.gangs, 1):
        lines += [f"srun --het-group={index} --kill-on-bad-exit=0 bash -c {shlex.quote(_task(gang))} &"]
    # The job ends when the controller does.
    lines += [f"srun --het-group=0 bash -c {shlex.quote(_task(plan.controller))}"]
    return "\n".join(lines) + "\n"


def _options(gang: Gang) -> Iterator[str]:
    yield f"--ntasks={gang.num}"
    yield f"--cpus-per-task={gang.num_cpus}"
    if gang.num_gpus:
        yield f"--gpus-per-task={gang.num_gpus}"


def _task(gang: Gang) -> str:
    """Return the shell command of one gang's tasks."""
    words = ["export INFLIGHT_ADDRESS=\"$(hostname -I | cut -d ' ' -f 1)\";"]
    if gang.are_ranks:
        words.append(f"export RANK=$SLURM_PROCID WORLD_SIZE={gang.num} OMP_NUM_THREADS={gang.num_cpus};")
        # A task with its own GPU sees no other GPU.
        words.append(f"export LOCAL_RANK={0 if gang.num_gpus else '$SLURM_LOCALID'};")
    command = " ".join(shlex.quote(word) for word in gang.command)
    return " ".join([*words, "exec", command.replace("{head}", "'\"$INFLIGHT_HEAD\"'")])


def jobset(plan: JobPlan, image: str, volume: tuple[str, str] | None) -> str:
    """Return a JobSet as JSON for ``kubectl apply -f``.

    The token comes from the key ``token`` of the secret ``NAME-token``. ``volume`` is a claim and its mount path, where
    every process reads the model and the configuration, and ranks write checkpoints. When a rank or the controller
    fails, all processes restart and the controller resumes the run.
    """
    name = _dns(plan.name)
    head = f"{name}-controller-0-0.{name}"
    document = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["controller"]},
            "failurePolicy": {"maxRestarts": 3},
            "replicatedJobs": [_job(gang, name, head, image, volume) for gang in (plan.controller, *plan.gangs)],
        },
    }
    return json.dumps(document, indent=2) + "\n"


def _job(gang: Gang, name: str, head: str, image: str, volume: tuple[str, str] | None) -> dict[str, Any]:
    resources: Mapping[str, str | int] = {
        "cpu": gang.num_cpus,
        **({"nvidia.com/gpu": gang.num_gpus} if gang.num_gpus else {}),
    }
    environment: list[dict[str, Any]] = [
        {"name": "INFLIGHT_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "INFLIGHT_TOKEN", "valueFrom": {"secretKeyRef": {"name": f"{name}-token", "key": "token"}}},
    ]
    if gang.are_ranks:
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        environment += [
            {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}},
            {"name": "WORLD_SIZE", "value": str(gang.num)},
            {"name": "LOCAL_RANK", "value": "0"},  # each rank has its own pod
            {"name": "OMP_NUM_THREADS", "value": str(gang.num_cpus)},
            {"name": "INFLIGHT_RUN", "value": f"{head}:{MEET_PORT}"},
        ]
    container: dict[str, Any] = {
        "name": gang.name,
        "image": image,
        "command": [word.replace("{head}", head) for word in gang.command],
        "env": environment,
        "resources": {"requests": resources, "limits": resources},
    }
    pod: dict[str, Any] = {"restartPolicy": "Never" if gang.are_ranks else "OnFailure", "containers": [container]}
    if volume is not None:
        claim, path = volume
        container["volumeMounts"] = [{"name": "shared", "mountPath": path}]
        container["workingDir"] = path
        pod["volumes"] = [{"name": "shared", "persistentVolumeClaim": {"claimName": claim}}]
    spec = {
        "parallelism": gang.num,
        "completions": gang.num,
        "completionMode": "Indexed",
        "backoffLimit": 0 if gang.are_ranks else 6,
        "template": {"spec": pod},
    }
    return {"name": gang.name, "replicas": 1, "template": {"spec": spec}}


def _dns(name: str) -> str:
    """Return a name in the form that Kubernetes allows in host names."""
    found = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].rstrip("-")
    if not found or not found[0].isalpha():
        raise ConfigError(
            f"{name!r} contains no letter, but a Kubernetes name must begin with one: choose another run.directory"
        )
    return found
