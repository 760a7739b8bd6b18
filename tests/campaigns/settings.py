"""The settings of a disturbed run."""

from __future__ import annotations

from pathlib import Path

from tests.campaigns.schedule import Schedule

GROUP_SIZE = 4
KEEPS = 2
"""Number of checkpoints that a run keeps."""


def settings_of(schedule: Schedule, place: Path, model: Path, engine_python: Path | None) -> dict[str, str]:
    """Return the settings of a run in ``place``, by their names in the configuration."""
    deadlines = schedule.deadlines
    settings = {
        "run.directory": str(place / "disk" / "run"),
        "run.num_steps": str(schedule.num_steps),
        "run.seed": str(schedule.seed),
        "run.keep_checkpoints": str(KEEPS),
        "run.start_timeout_s": f"{deadlines.start_s:g}",
        "run.step_timeout_s": f"{deadlines.step_s:g}",
        "run.save_timeout_s": f"{deadlines.step_s:g}",
        "model.path": str(model),
        "task.name": "tests.campaigns.task:letters",
        "task.params.control": str(place / "control"),
        "task.params.long_every": str(schedule.long_every),
        "task.reward_timeout_s": f"{deadlines.reward_s:g}",
        "sampling.group_size": str(GROUP_SIZE),
        "sampling.max_tokens": "24",
        "servers.max_concurrent": "16",
        "updates.deadline_s": f"{deadlines.publish_s:g}",
        "sampling.generate_timeout_s": f"{deadlines.generate_s:g}",
        "train.num_ranks": "2",
        "train.tokens_per_worker": "400",
        "train.max_tokens_per_micro_batch": "512",
        "train.learning_rate": "5e-3",
        **_servers_of(schedule, place, engine_python),
        **schedule.overrides,
    }
    if schedule.engine is not None and schedule.engine.is_large:
        settings |= {"model.dtype": "bfloat16", "train.learning_rate": "1e-5"}
    if settings["updates.transport"] == "file":
        settings["updates.directory"] = str(place / "store")
    return settings


def urls_file(place: Path) -> Path:
    """Return the file that lists the server to which a run in ``place`` attaches."""
    return place / "control" / "servers.txt"


def _servers_of(schedule: Schedule, place: Path, engine_python: Path | None) -> dict[str, str]:
    if schedule.engine is None:
        return {"servers.count": "2"}
    if schedule.engine.is_attached:
        return {"servers.count": "1", "servers.attach.urls_file": str(urls_file(place))}
    started = f'{{ engine = "{schedule.engine.name}", python = "{engine_python}" }}'
    return {"servers.fleet": f'[{{ engine = "embedded" }}, {started}]'}
