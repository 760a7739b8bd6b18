"""Stands in for PipelineRL's trainer, in a process of its own: its messages and broadcasts, in its order.

    python -m tests.dialects.pipelinerl_trainer '{"model": ..., "urls": [...], "port": ..., "world_size": ...}'

Written after ``finetune_loop.py``: the group first, then the servers' health, then version 0, then one version a line
of standard input says. Requests are sent first and not waited for; then every parameter is broadcast. Nothing of
inflight is imported. Unlike PipelineRL, it states what was answered: one line of JSON for each version.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import httpx
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper


def init_extra_process_group(port: int, world_size: int, rank: int = 0) -> Any:
    """What ``torch_utils.init_extra_process_group`` does with the backend gloo and the name ``actor``."""
    timeout = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0, timeout=timeout, use_libuv=False)
    group, _ = _new_process_group_helper(
        world_size, rank, [], Backend("gloo"), PrefixStore("actor", store), group_name="actor", timeout=timeout
    )
    return group


def wait_for_inference_servers(urls: list[str]) -> None:
    while True:
        try:
            if all(httpx.get(f"{url}/health").status_code == 200 for url in urls):
                return
        except httpx.ConnectError:
            pass
        time.sleep(0.1)


def send_weight_update(
    group: Any, urls: list[str], version: int, parameters: dict[str, torch.Tensor], pool: ThreadPoolExecutor, **odd: Any
) -> None:
    infos = [{"name": n, "shape": list(p.shape), "dtype": str(p.dtype)} for n, p in parameters.items()]
    message = {
        "kind": "weight_update_request",
        "version": version,
        "parameters_info": infos,
        "timestamp": 0.0,
    } | odd
    calls = [pool.submit(httpx.post, f"{url}/receive_weight_update", json=message, timeout=None) for url in urls]
    problem = ""
    try:
        for parameter in parameters.values():
            group.broadcast(parameter, 0).wait()
    except RuntimeError as error:
        problem = type(error).__name__
    answers = [(call.result().status_code, call.result().text) for call in calls]
    print(json.dumps({"version": version, "answers": answers, "broadcasts": problem}), flush=True)


def main(told: dict[str, Any]) -> None:
    group = init_extra_process_group(told["port"], told["world_size"])
    wait_for_inference_servers(told["urls"])
    parameters = dict(sorted(load_file(f"{told['model']}/model.safetensors").items()))
    pool = ThreadPoolExecutor(max_workers=4)
    send_weight_update(group, told["urls"], 0, parameters, pool)
    for line in sys.stdin:
        step = json.loads(line)
        sent = {name: tensor * step.get("scale", 1.0) for name, tensor in parameters.items()}
        if step.get("silent"):
            sent["model.norm.weight"].zero_()
        for name in step.get("without", ()):
            del sent[name]
        odd = {"parameters_info": step["parameters_info"]} if "parameters_info" in step else {}
        send_weight_update(group, told["urls"], step["version"], sent, pool, **odd)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
