"""Constructs the work of a run, completions or episodes, from its configuration."""

from __future__ import annotations

from typing import Any

from inflight.contracts import Environment, Task
from inflight.environments.playing import Proxy
from inflight.environments.transcripts import ChatTemplate
from inflight.errors import ConfigError, InflightError
from inflight.model.images import ImageProcessor
from inflight.rollouts.tasks import TaskSettings
from inflight.run.config import RunConfig
from inflight.run.sampling.completions import Completions, opening_messages
from inflight.run.sampling.episodes import Episodes
from inflight.run.sampling.scoring import ScoringPool
from inflight.run.sampling.work import Work
from inflight.wire import SamplingParams

_LOAD_S = 120.0
"""The minimum time limit, in seconds, for a process to load its task."""


def check_task(config: RunConfig, task: Task | Environment) -> None:
    """Raise `ConfigError` if options for environments are set for a task, or the other way round."""
    name = config.task.name
    if isinstance(task, Environment):
        for setting in ("reward_processes", "system_prompt", "prompt_template", "answer_pattern"):
            if getattr(config.task, setting) not in (None, 0):
                raise ConfigError(f"task.{setting} is for tasks, but {name!r} is an environment: omit this setting")
        if config.evaluation.num_items:
            raise ConfigError(f"evaluation.num_items is for tasks, but {name!r} is an environment: omit this setting")
        return
    for setting, is_set in (
        ("task.extra_episodes", config.task.extra_episodes > 0),
        ("rollouts.credit", config.rollouts.credit != "episode"),
    ):
        if is_set:
            raise ConfigError(f"{setting} is for environments, but {name!r} is a task: omit this setting")


def check_system_prompt(config: RunConfig, tokenizer: Any) -> None:
    """Raise `ConfigError` if the model's chat template does not render the configured system message."""
    system_prompt, problem = config.task.system_prompt, None
    if system_prompt is None:
        return
    try:
        prompt = ChatTemplate(tokenizer).opening(opening_messages(system_prompt, "?"))
        if system_prompt.strip() not in prompt.text:
            problem = "its chat template omits system messages"
    except InflightError as error:
        problem = str(error)
    if problem is not None:
        raise ConfigError(
            f"task.system_prompt cannot be used with {str(config.model.path)!r}: {problem}; leave it out, and write "
            "task.prompt_template instead"
        )


def work_of(
    config: RunConfig, task: Task | Environment, tokenizer: Any, images: ImageProcessor | None, proxy: Proxy
) -> Work:
    """Return the work of a task or environment that `check_task` has accepted.

    ``images`` is None if the model accepts no images. ``proxy`` serves the episodes that request a URL.
    """
    sampling = SamplingParams(
        n=config.sampling.group_size,
        temperature=config.sampling.temperature,
        max_tokens=config.sampling.max_tokens,
    )
    max_tokens = config.train.max_tokens_per_micro_batch
    template = ChatTemplate(tokenizer, images)
    if isinstance(task, Environment):
        return Episodes(
            task,
            template,
            sampling,
            num_needed=config.sampling.group_size,
            num_extra=config.task.extra_episodes,
            max_sequence_tokens=max_tokens,
            timeout_s=config.task.episode_timeout_s,
            proxy=proxy,
            routed_experts=config.train.router_replay,
        )
    pool: ScoringPool | None = None
    num_processes = config.task.reward_processes
    if num_processes != 0:
        pool = ScoringPool(
            num_processes or 1,
            TaskSettings.model_validate(config.task.model_dump(include=set(TaskSettings.model_fields))),
            config.run.seed,
            config.model.path,
            max(_LOAD_S, config.run.start_timeout_s),
            how="together" if num_processes is None else "in turn",
        )
    return Completions(
        task,
        tokenizer,
        sampling,
        max_tokens,
        config.task.reward_timeout_s,
        pool,
        system_prompt=config.task.system_prompt,
        routed_experts=config.train.router_replay,
    )
