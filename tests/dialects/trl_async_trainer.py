"""TRL's AsyncGRPOTrainer with its own rollout worker against a server with vLLM's routes, as far as a CPU allows.

    python -m tests.dialects.trl_async_trainer full|lora MODEL URL DIRECTORY

Full weights go through a directory instead of NCCL; a LoRA takes TRL's own way. What needs a GPU is replaced: the
attention kernel (by torch's), and the figures of the device. The process of the rollout worker is forked before the
first step, instead of importing everything once more. Everything else is TRL's.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import sys
import tempfile
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as functional
import trl.experimental.async_grpo.async_grpo_trainer as trainer_module
import trl.experimental.async_grpo.async_rollout_worker as worker_module
import trl.experimental.async_grpo.packing as packing_module
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoTokenizer
from trl.chat_template_utils import llama3_template
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.vllm_client import VLLMClient


class Kernels:
    @staticmethod
    def flash_attn_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        starts_q: torch.Tensor,
        starts_k: torch.Tensor,
        *_: int,
        softmax_scale: float,
        **__: Any,
    ) -> torch.Tensor:
        """Causal attention of packed sequences [T, heads, size], whose queries are the last tokens of their keys."""
        parts = []
        repeats = q.shape[1] // k.shape[1]
        for (a, b), (c, d) in zip(pairs(starts_q), pairs(starts_k), strict=True):
            mask = torch.arange(d - c)[None, :] <= torch.arange(b - a)[:, None] + (d - c) - (b - a)
            keys, values = (it[c:d].repeat_interleave(repeats, 1).transpose(0, 1) for it in (k, v))
            queries = q[a:b].transpose(0, 1)
            part = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=softmax_scale)
            parts.append(part.transpose(0, 1))
        return torch.cat(parts)


def pairs(starts: torch.Tensor) -> list[tuple[int, int]]:
    return list(pairwise(starts.tolist()))


trainer_module.get_peak_flops_per_device = lambda *_: 1.0
worker_module.is_vllm_available = lambda *_, **__: True
worker_module.mp = SimpleNamespace(get_context=lambda _: multiprocessing.get_context("fork"))
packing_module._flash_attn = lambda: Kernels


def reward(completions: list[Any], **_: Any) -> list[float]:
    texts = [it if isinstance(it, str) else it[0]["content"] for it in completions]
    return [text.count("e") / max(1, len(text)) for text in texts]


class DirectoryTransfer:
    """TRL's WeightTransferProtocol, through a directory."""

    def __init__(self, url: str, model: Path, directory: Path) -> None:
        self.client, self.model, self.directory = VLLMClient(url), model, directory
        self.num_sent = 0

    def init_weight_transfer(self) -> None:
        self.client.wait_for_server_ready()

    def pause(self) -> None:
        self.client.pause()

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.num_sent += 1
        written = self.directory / f"step-{self.num_sent}"
        written.mkdir()
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in iterator}
        save_file(tensors, written / "model.safetensors", {"format": "pt"})
        shutil.copy(self.model / "config.json", written)
        self.client.start_weight_update()
        self.client.update_weights({"weight_dir": str(written)})
        self.client.finish_weight_update()

    def resume(self) -> None:
        self.client.resume()

    def destroy(self) -> None:
        pass


def main() -> None:
    mode, model, url, directory = sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.response_template, tokenizer.response_schema = llama3_template, {}
    arguments: dict[str, Any] = {"weight_transfer": DirectoryTransfer(url, Path(model), directory)}
    output = tempfile.mkdtemp()
    if mode == "lora":
        from peft import LoraConfig

        lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        arguments, output = {"peft_config": lora}, str(directory)
    config = AsyncGRPOConfig(
        output,
        vllm_server_base_url=url,
        max_steps=3,
        num_generations=4,
        per_device_train_batch_size=4,
        max_completion_length=16,
        learning_rate=1e-3,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        weight_sync_steps=1,
        max_staleness=2,
    )
    prompts = [[{"role": "user", "content": word}] for word in ("first", "second", "third", "fourth")] * 8
    dataset = Dataset.from_dict({"prompt": prompts})
    trainer = AsyncGRPOTrainer(
        model, reward_funcs=reward, args=config, train_dataset=dataset, processing_class=tokenizer, **arguments
    )
    trainer.train()
    print(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main()
