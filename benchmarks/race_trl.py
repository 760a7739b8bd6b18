"""The entrant ``trl`` of benchmarks/race.py: TRL's GRPOTrainer on the model, task and optimizer of a run of inflight.

    python -m benchmarks.race_trl benchmarks/race.toml --run.directory runs/trl --run.seed 1

It reads the configuration of a run, with overrides, and writes to the run's directory what a run of inflight writes and
the race reads: a row of ``metrics.jsonl`` for each optimizer step, and in ``events.jsonl`` when sampling began.

The loss is ``dr_grpo`` without scaled rewards, a sum over the tokens of each completion, with rewards weighted so that
the gradient is the one of ``pipelinerl_paper`` with ``leave_one_out`` for completions of the current weights.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from inflight.contracts import Task
from inflight.model.checkpoints import load_tokenizer
from inflight.observe.trace.events import SCHEMA_VERSION
from inflight.run.config import RunConfig, load_config

PRECISIONS = {
    "float32": (torch.float32, False),
    "autocast": (torch.float32, True),
    "bfloat16": (torch.bfloat16, False),
}
"""The dtype of the weights, and whether TRL computes under bfloat16 autocast."""


class StepRows(TrainerCallback):
    """Scores completions with the task, and writes a row for each optimizer step."""

    def __init__(self, directory: Path, task: Task, decode: Callable[[list[int]], str], group_size: int) -> None:
        directory.mkdir(parents=True)
        self._directory, self._task, self._decode, self._group_size = directory, task, decode, group_size
        self._began_at = time.time()
        self._rewards: list[float] = []
        self._num_samples = 0

    def score(self, completion_ids: list[list[int]], item: list[int], **_: Any) -> list[float]:
        """Return the reward of each completion; TRL calls this once for each step."""
        texts = map(self._decode, completion_ids)
        self._rewards = [self._task.score(self._task.item(i), text) for i, text in zip(item, texts, strict=True)]
        self._num_samples += len(self._rewards)
        return self._rewards

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record when the first step begins, which TRL begins by sampling."""
        if state.global_step == 0:
            sampling_s = time.time() - self._began_at
            self._append(
                "events.jsonl",
                {
                    "kind": "run_started",
                    "start_s": 0.0,
                    "schema_version": SCHEMA_VERSION,
                    "began_at": self._began_at,
                },
            )
            self._append("events.jsonl", {"kind": "request", "start_s": sampling_s})

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the row of a step. Only completions of groups with different rewards count as trained on."""
        starts = range(0, len(self._rewards), self._group_size)
        groups = [self._rewards[i : i + self._group_size] for i in starts]
        row = {
            "version": state.global_step,
            "time_s": time.time() - self._began_at,
            "reward": sum(self._rewards) / len(self._rewards),
            "num_samples": self._num_samples,
            "num_step_sequences": sum(len(group) for group in groups if len(set(group)) > 1),
        }
        self._append("metrics.jsonl", row)

    def _append(self, name: str, row: dict[str, Any]) -> None:
        with (self._directory / name).open("a") as file:
            file.write(json.dumps(row) + "\n")


def problems_of(task: Task, num_items: int) -> Dataset:
    """Return the first items of a task as a dataset of TRL."""
    prompts = [[{"role": "user", "content": task.item(i).prompt}] for i in range(num_items)]
    return Dataset.from_dict({"prompt": prompts, "item": list(range(num_items))})


def trl_settings(config: RunConfig, num_prompts: int, *, autocast: bool) -> GRPOConfig:
    """Return the settings of the trainer: those of the run, without anything that TRL can do without."""
    sampling, train = config.sampling, config.train
    return GRPOConfig(
        output_dir=str(config.run.directory),
        max_steps=config.run.num_steps,
        seed=config.run.seed,
        num_generations=sampling.group_size,
        per_device_train_batch_size=sampling.group_size,  # a group is faster than a whole step
        gradient_accumulation_steps=num_prompts,
        max_completion_length=sampling.max_tokens,
        temperature=sampling.temperature,
        loss_type="dr_grpo",
        scale_rewards="none",
        reward_weights=[sampling.max_tokens * sampling.group_size / (sampling.group_size - 1)],
        beta=0.0,
        learning_rate=train.learning_rate,
        max_grad_norm=train.max_gradient_norm or 0.0,
        use_cpu=True,
        bf16=autocast,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def main(words: Sequence[str] | None = None) -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--precision", choices=PRECISIONS, default="autocast")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=3, help="of an optimizer step")
    arguments, overrides = parser.parse_known_args(words)
    torch.set_num_threads(arguments.threads)
    config = load_config(arguments.config, overrides)
    train, (dtype, autocast) = config.train, PRECISIONS[arguments.precision]
    task = config.task.load(config.run.seed)
    assert isinstance(task, Task)
    tokenizer: Any = load_tokenizer(config.model.path)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=dtype)
    adamw = torch.optim.AdamW(model.parameters(), train.learning_rate, weight_decay=train.weight_decay, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: min(1.0, (step + 1) / max(1, train.warmup_steps)))

    def text_of(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    rows = StepRows(config.run.directory, task, text_of, config.sampling.group_size)
    GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=rows.score,
        train_dataset=problems_of(task, config.run.num_steps * arguments.prompts),
        args=trl_settings(config, arguments.prompts, autocast=autocast),
        callbacks=[rows],
        optimizers=(adamw, schedule),
    ).train()


if __name__ == "__main__":
    main()
