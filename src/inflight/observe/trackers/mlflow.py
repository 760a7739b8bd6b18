"""MLflow, at ``tracking_uri`` (default: MLFLOW_TRACKING_URI), in the experiment ``experiment``."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from inflight.observe.trackers.tracker import TrackedRun, Tracker

_RUN_ID = "inflight.run_id"
_MAX_METRICS, _MAX_PARAMS = 1000, 100
"""The largest numbers of metrics and of parameters that MLflow accepts in one call."""
_MAX_CHARACTERS = 500
"""Maximum length of a parameter's value on older MLflow servers."""


class Mlflow(Tracker):
    """Logs each optimizer step under its version, in the run with the tag ``inflight.run_id``.

    MLflow keeps both values of a step that a resumed run repeats.
    """

    def __init__(self, tracking_uri: str | None = None, experiment: str = "inflight") -> None:
        self._tracking_uri = tracking_uri
        self._experiment = experiment
        self._client: MlflowClient | None = None
        self._id = ""

    def begin(self, run: TrackedRun) -> str:
        self._client = client = MlflowClient(self._tracking_uri)
        found = client.get_experiment_by_name(self._experiment)
        experiment = client.create_experiment(self._experiment) if found is None else found.experiment_id
        earlier = client.search_runs([experiment], f"tags.`{_RUN_ID}` = '{run.run_id}'", max_results=1)
        if earlier:
            self._id = earlier[0].info.run_id
            client.update_run(self._id, status="RUNNING")
        else:
            self._id = client.create_run(experiment, run_name=run.run_id, tags={_RUN_ID: run.run_id}).info.run_id
            params = [Param(name, value) for name, value in _settings(run.config)]
            for first in range(0, len(params), _MAX_PARAMS):
                client.log_batch(self._id, params=params[first : first + _MAX_PARAMS])
        return f"run {self._id} of experiment {self._experiment!r}"

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        assert self._client is not None
        now_ms = int(time.time() * 1000)
        batch = [Metric(name, value, now_ms, version) for name, value in metrics.items()]
        for first in range(0, len(batch), _MAX_METRICS):
            self._client.log_batch(self._id, metrics=batch[first : first + _MAX_METRICS])

    def end(self, failure: str | None) -> None:
        assert self._client is not None
        if failure is not None:
            self._client.set_tag(self._id, "inflight.failure", failure)
        self._client.set_terminated(self._id, "FINISHED" if failure is None else "FAILED")


def _settings(config: Mapping[str, object], prefix: str = "") -> list[tuple[str, str]]:
    """Return the fields of a configuration that are set, with names such as ``train.learning_rate``."""
    settings: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            settings += _settings(value, f"{prefix}{key}.")
        elif value is not None:
            text = value if isinstance(value, str) else json.dumps(value)
            settings.append((prefix + key, text[:_MAX_CHARACTERS]))
    return settings
