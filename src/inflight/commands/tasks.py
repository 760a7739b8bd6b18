"""The command ``inflight tasks``."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

from inflight.base.json_files import check_writable, write_json
from inflight.base.text_tables import align_columns
from inflight.commands.shared import add_json_argument, print_progress, require_at_least, require_positive
from inflight.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = (
        "A task can be learned if some groups have a signal: completions with different rewards. Columns: mean "
        "reward, share of groups with a signal, median tokens of prompts and of answers, share of answers cut off "
        "at --max-tokens, and seconds to sample the groups of one step on this machine."
    )
    parser.add_argument("names", nargs="*", metavar="TASK", help="tasks to sample (default: all of reasoning-gym)")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="the model directory to sample from")
    parser.add_argument("--params", default="{}", metavar="JSON", help="parameters of the tasks, as a JSON object")
    parser.add_argument("--system-prompt", metavar="TEXT", help="system prompt, as task.system_prompt of a run")
    parser.add_argument("--prompt-template", metavar="TEXT", help="prompt template, as task.prompt_template of a run")
    parser.add_argument("--answer-pattern", metavar="REGEX", help="answer pattern, as task.answer_pattern of a run")
    parser.add_argument("--items", type=int, default=8, help="number of problems per task (default: %(default)s)")
    parser.add_argument("--group-size", type=int, default=8, help="completions per problem (default: %(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=64, help="maximum number of tokens per completion (default: %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="sampling temperature (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=0, help="seed of items and sampling (default: %(default)s)")
    parser.add_argument(
        "--groups-per-step", type=int, default=8, help="number of groups per step (default: %(default)s)"
    )
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="number of CPU threads (default: all processors)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the model (default: %(default)s)"
    )
    parser.add_argument("--examples", action="store_true", help="also print a problem and the best answer of each task")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Sample each task and print the figures, tasks with the most signal first; return 1 if no task was sampled."""
    from inflight.base.toml import check_settings
    from inflight.rollouts.tasks import AnswerFormat

    require_at_least(arguments, items=1, group_size=2, max_tokens=1, groups_per_step=1, threads=1)
    require_positive(arguments, "temperature")
    check_writable({"json": arguments.json})
    answer_format = check_settings(
        AnswerFormat,
        {"prompt_template": arguments.prompt_template, "answer_pattern": arguments.answer_pattern},
        "--prompt-template and --answer-pattern",
    )
    try:
        params = json.loads(arguments.params)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--params {arguments.params!r} is not JSON: {error}") from error
    if not isinstance(params, dict):
        raise ConfigError(f"--params must be a JSON object, not {arguments.params!r}")
    return asyncio.run(_run(arguments, params, answer_format))


async def _run(arguments: argparse.Namespace, params: dict[str, Any], answer_format: Any) -> int:
    import torch

    from inflight.bench.tasks import HEAD, TaskSampling, sample_tasks
    from inflight.engines.embedded.loading import load_endpoint
    from inflight.model.checkpoints import load_tokenizer
    from inflight.rollouts.tasks import reasoning_gym_names

    names = arguments.names or reasoning_gym_names()
    how = TaskSampling(
        num_items=arguments.items,
        group_size=arguments.group_size,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
        groups_per_step=arguments.groups_per_step,
        system_prompt=arguments.system_prompt,
        answer_format=answer_format,
    )
    torch.set_num_threads(arguments.threads)
    tokenizer = load_tokenizer(arguments.model)
    if tokenizer is None:
        raise ConfigError(f"model directory {str(arguments.model)!r} has no tokenizer")
    num_together = arguments.items * arguments.group_size
    endpoint = load_endpoint(arguments.model, dtype=arguments.dtype, max_concurrent=num_together)
    started, found = time.monotonic(), []
    try:
        async for it in sample_tasks(endpoint, tokenizer, names, params, how):
            found.append(it)
            elapsed_s = time.monotonic() - started
            left_s = elapsed_s / len(found) * (len(names) - len(found))
            print_progress(f"{len(found)}/{len(names)} {'  '.join(filter(None, it.row()))}; {left_s:.0f} s left")
    finally:
        await endpoint.aclose()
        found.sort(key=lambda it: (it.problem is not None, -it.signal_share, it.name))
        if found:
            print(align_columns([HEAD, *(it.row() for it in found)]))
        write_json(arguments.json, [dataclasses.asdict(it) for it in found])
    if arguments.examples:
        for it in found:
            if it.example is not None:
                print(f"\n{it.name}\n  problem: {it.example[0]!r}\n  best answer: {it.example[1]!r}")
    return 1 if all(it.problem is not None for it in found) else 0
