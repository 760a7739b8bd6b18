"""The command ``inflight tiny-model``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from inflight.commands.shared import print_line
from inflight.contracts import Environment, Task
from inflight.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("output", type=Path, metavar="OUTPUT_DIR", help="where to write the model")
    parser.add_argument(
        "--task",
        default="spell_backward",
        help="reasoning-gym dataset, or a task as in run.toml (default: %(default)s)",
    )
    parser.add_argument("--steps", type=int, help="number of imitation steps (default: 1400, or 100 with --images)")
    parser.add_argument(
        "--batch-size", type=int, default=16, help="maximum number of demonstrations per step (default: %(default)s)"
    )
    parser.add_argument(
        "--wrong-fraction",
        type=float,
        help="share of deliberately wrong demonstrations in the last part of the training (default: 0.6) or, with "
        "--images, in all of it (default: 1, which teaches only the form of the answers)",
    )
    parser.add_argument("--style", choices=("answer", "grown"), default="grown", help="form of the demonstrations")
    parser.add_argument(
        "--family",
        choices=("llama", "qwen2", "qwen3", "qwen3_moe"),
        default="llama",
        help="model type (default: %(default)s)",
    )
    parser.add_argument("--hidden-size", type=int, default=96, help="width of the model (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="number of layers (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=3, help="number of attention heads (default: %(default)s)")
    parser.add_argument(
        "--max-model-len",
        type=int,
        help=("length of the context in tokens (default: 512, or more if the task needs it)"),
    )
    parser.add_argument(
        "--images",
        action="store_true",
        help="make a LLaVA model, which accepts images, and warm-start it on the images of a task or environment",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Create the model, train it on demonstrations and write it."""
    from inflight.base.progress import ProgressLines
    from inflight.engines.embedded.tiny import TinyShape, context_of, create_tiny_model, save_tiny_model, warm_start
    from inflight.rollouts.tasks import load_task

    task = load_task(arguments.task, {}, arguments.seed)
    if arguments.images:
        return _tiny_image_model(arguments, task)
    if not isinstance(task, Task):
        raise ConfigError(f"{arguments.task!r} is an environment, which has no answers to imitate: choose a task")
    context = arguments.max_model_len or context_of(task, arguments.style)
    shape = TinyShape(arguments.family, arguments.hidden_size, arguments.layers, arguments.heads, context)
    model = create_tiny_model(shape, arguments.seed)
    num_steps = 1400 if arguments.steps is None else arguments.steps
    print_line(f"warm start on {task.name}, {num_steps:,} steps, a context of {context:,} tokens")
    lines = ProgressLines("steps", num_steps, print_line)
    warm_start(
        model,
        task,
        num_steps=num_steps,
        batch_size=arguments.batch_size,
        wrong_fraction=0.6 if arguments.wrong_fraction is None else arguments.wrong_fraction,
        style=arguments.style,
        seed=arguments.seed,
        on_progress=lambda step, loss: lines.update(step, f"loss {loss:.3f}"),
    )
    save_tiny_model(model, arguments.output)
    _report_written(arguments.output, model, num_steps, task.name)
    return 0


def _tiny_image_model(arguments: argparse.Namespace, task: Task | Environment) -> int:
    from inflight.base.progress import ProgressLines
    from inflight.engines.embedded.tiny_images import (
        TinyImageShape,
        create_tiny_image_model,
        save_tiny_image_model,
        warm_start_on_images,
    )

    context = arguments.max_model_len or 512
    shape = TinyImageShape(arguments.hidden_size, arguments.layers, arguments.heads, context)
    model = create_tiny_image_model(shape, arguments.seed)
    num_steps = 100 if arguments.steps is None else arguments.steps
    lines = ProgressLines("steps", num_steps, print_line)
    warm_start_on_images(
        model,
        task,
        num_steps=num_steps,
        batch_size=arguments.batch_size,
        wrong_fraction=1.0 if arguments.wrong_fraction is None else arguments.wrong_fraction,
        seed=arguments.seed,
        on_progress=lambda step, loss: lines.update(step, f"loss {loss:.3f}"),
    )
    save_tiny_image_model(model, arguments.output)
    _report_written(arguments.output, model, num_steps, task.name)
    return 0


def _report_written(path: Path, model: Any, num_steps: int, task: str) -> None:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print_line(f"wrote {path} ({num_parameters:,} parameters, {num_steps} steps on {task})")
