"""Loads weights into a model of vLLM in this process: ``python loading_program.py MODEL_DIR``, in vLLM's environment.

They are loaded by vLLM's own reload, then prepared. A line of JSON after each load has digests of everything that the
model computes with, and the tensors that were left to vLLM's loaders. The loader of the final norm doubles its tensor.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}

import torch
from safetensors.torch import load_file
from vllm import LLM
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from inflight_vllm.reloading import PreparedLoad, ReloadedModel


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def held(model: Any) -> dict[str, str]:
    """Return a digest of each parameter, and of what each packed layer computes of fixed inputs."""
    found = {name: digest(parameter.data) for name, parameter in model.named_parameters() if parameter.numel()}
    for name, layer in model.named_modules():
        if (packed := getattr(layer, "cpu_linear", None)) is not None:
            width = getattr(layer, "input_size_per_partition", None) or layer.embedding_dim
            generator = torch.Generator().manual_seed(0)
            inputs = torch.randn(4, width, generator=generator)
            found[f"{name}()"] = digest(packed(inputs, layer.weight, getattr(layer, "bias", None)))
    return found


def doubled(param: torch.Tensor, loaded: torch.Tensor) -> None:  # vLLM's reload replaces the argument of this name
    param.data.copy_(loaded)
    param.data.mul_(2)


def main(directory: Path) -> None:
    llm = LLM(str(directory), enforce_eager=True, dtype="float32", max_model_len=128, max_num_seqs=4)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    model, config, vllm_config = worker.model_runner.get_model(), llm.llm_engine.model_config, worker.vllm_config
    first = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    second = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in first.items()}
    reloaded = ReloadedModel(model, config, torch.device("cpu"))
    get_layerwise_info(model.model.norm).restore_metadata[0]["weight"].weight_loader = doubled
    with set_current_vllm_config(vllm_config):
        print(json.dumps({"way": "started", "held": held(model)}), flush=True)
        reloaded.find_layers({name: tuple(tensor.shape) for name, tensor in first.items()})
        print(json.dumps({"way": "traced", "held": held(model)}), flush=True)
        for way, tensors in (("vllm", second), ("vllm", first), ("prepared", second), ("prepared", first)):
            prepared = reloaded.prepare(list(tensors.items()))
            if way == "vllm":
                prepared = PreparedLoad([], list(tensors.items()))
            reloaded.load(prepared)
            left = [name for name, _ in prepared.rest]
            print(json.dumps({"way": way, "left": left, "held": held(model)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
