"""Prometheus metrics of a run, updated from its events, and the server that exposes them."""

from __future__ import annotations

import math
from collections import Counter as Tally
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, start_http_server

from inflight.errors import ConfigError
from inflight.observe.trace import events

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_PARTS = ("gather_s", "wire_s", "load_s", "pause_s", "first_token_s", "total_s")
OF_STEPS = {
    "reward": ("inflight_run_reward", "Mean reward of the rollouts that finished since the previous step"),
    "lag_mean": ("inflight_run_lag_mean", "Mean lag of the trained tokens, in versions"),
    "lag_max": ("inflight_run_lag_max", "Largest lag of a trained token"),
    "effective_sample_size": (
        "inflight_run_effective_sample_size",
        "Effective sample size of the step, as a share of its tokens",
    ),
    "mismatch_k3": ("inflight_run_mismatch_k3", "KL divergence of trainer and servers at lag 0"),
    "stale_k3": ("inflight_run_stale_k3", "Additional KL divergence caused by the lag"),
    "gradient_norm": ("inflight_run_gradient_norm", "Before clipping"),
    "completion_length": (
        "inflight_run_completion_length",
        "Mean length of the completions since the previous step, in tokens",
    ),
    "utilisation": ("inflight_run_utilisation", "Share of all slots that were sampling"),
    "bubble_share": ("inflight_run_bubble_share", "Share of free slots on servers that accept work"),
    "trained_tokens_per_s": (
        "inflight_run_trained_tokens_per_second",
        "Trained tokens per second, mean since the run began",
    ),
    "completion_tokens_per_s": (
        "inflight_run_completion_tokens_per_second",
        "Sampled tokens per second, mean since the run began",
    ),
}
"""Metrics of a step that are exported unchanged."""


COUNTERS = {
    "steps": ("Optimizer steps",),
    "trained_tokens": ("Tokens of optimizer steps",),
    "stale_tokens": ("Tokens that were masked because of their lag",),
    "completions": ("Rollouts of complete groups",),
    "completion_tokens": ("Sampled tokens of complete groups",),
    "requests": ("Requests to servers that have ended", "endpoint", "outcome"),
    "items": ("Items that the ledger settled", "outcome"),
    "publishes": ("Outcomes of publishes, counted for each server", "outcome"),
    "published_bytes": ("Bytes of weights that were sent or stored",),
    "failed_episodes": ("Episodes that failed and are not trained on", "reason"),
    "failures": ("Failures that ended an incarnation of the run",),
}
GAUGES = {
    "weight_version": ("Number of trained versions so far",),
    "groups": ("Groups that are being sampled, and complete groups that wait", "state"),
    "items_outstanding": ("Items that were issued and are not settled",),
    "servers": ("Servers by state", "state"),
}
HISTOGRAMS = {
    "train_seconds": ("Duration of optimizer steps, without the publish",),
    "request_seconds": ("Duration of requests to servers", "endpoint"),
    "publish_seconds": ("Duration of the parts of publishes", "part"),
}
"""Help text and labels of each metric, by its name without ``inflight_run_``."""


class RunMetrics:
    """The metrics of a run. Counters start at 0 in this process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._info = Info("inflight_run", "The run", registry=registry)
        self._counters = {
            name: Counter(f"inflight_run_{name}", text, labels, registry=registry)
            for name, (text, *labels) in COUNTERS.items()
        }
        self._gauges = {
            name: Gauge(f"inflight_run_{name}", text, labels, registry=registry)
            for name, (text, *labels) in GAUGES.items()
        }
        self._histograms = {
            name: Histogram(f"inflight_run_{name}", text, labels, registry=registry, buckets=_SECONDS)
            for name, (text, *labels) in HISTOGRAMS.items()
        }
        self._of_steps = {key: Gauge(name, text, registry=registry) for key, (name, text) in OF_STEPS.items()}
        for of_step in self._of_steps.values():
            of_step.set(math.nan)  # unknown before the first step
        self._has_server_states = False

    def count(self, event: events.Event) -> None:
        """Update the metrics with an event."""
        counters, gauges = self._counters, self._gauges
        match event:
            case events.RunStarted():
                task = event.config.get("task", {}).get("name", "")
                directory = event.config.get("run", {}).get("directory", "")
                self._info.info({"inflight": event.inflight, "task": task, "directory": directory})
                gauges["weight_version"].set(event.version)
            case events.RequestEnded():
                outcome = "ended" if event.error is None else "cancelled" if event.error == "cancelled" else "failed"
                address = _address(event.endpoint)
                counters["requests"].labels(address, outcome).inc()
                self._histograms["request_seconds"].labels(address).observe(event.end_s - event.start_s)
            case events.RunningGroups():
                gauges["groups"].labels("running").set(event.num_groups)
            case events.GroupFinished():
                counters["completions"].inc(len(event.rewards))
                counters["completion_tokens"].inc(sum(event.lengths))
            case events.ItemDropped():
                counters["items"].labels(event.reason).inc()
            case events.EpisodeFailed():
                counters["failed_episodes"].labels(event.reason).inc()
            case events.StepTrained():
                gauges["weight_version"].set(event.version)
                counters["items"].labels("trained").inc(len(event.items))
                self._histograms["train_seconds"].observe(event.end_s - event.start_s)
            case events.WeightsPublished():
                self._count_publish(event)
            case events.FleetChanged():
                self._has_server_states = self._has_server_states or bool(event.states)
                if event.states:
                    self._set_servers(Tally(event.states.values()))
            case events.StepCompleted():
                self._count_step(event.model_extra or {}, event)
            case events.Failure():
                counters["failures"].inc()

    def _count_publish(self, event: events.WeightsPublished) -> None:
        for part in _PARTS:
            if (seconds := getattr(event, part)) is not None:
                self._histograms["publish_seconds"].labels(part.removesuffix("_s")).observe(seconds)
        self._counters["published_bytes"].inc(event.sent_bytes)
        for outcome in event.outcomes.values():
            self._counters["publishes"].labels(outcome).inc()
        if not self._has_server_states:  # the fleet has never changed
            self._set_servers(Tally("healthy" if it == "applied" else "suspect" for it in event.outcomes.values()))

    def _set_servers(self, by_state: Mapping[str, int]) -> None:
        self._gauges["servers"].clear()
        for state, number in by_state.items():
            self._gauges["servers"].labels(state).set(number)

    def _count_step(self, facts: Mapping[str, Any], step: events.StepCompleted) -> None:
        self._counters["steps"].inc()
        for key, gauge in self._of_steps.items():
            value = step.reward if key == "reward" else facts.get(key)
            if value is not None:
                gauge.set(value)
        self._counters["trained_tokens"].inc(facts.get("num_step_tokens", 0))
        self._counters["stale_tokens"].inc(facts.get("num_stale_tokens", 0))
        self._gauges["groups"].labels("waiting").set(facts.get("groups_waiting", 0))
        self._gauges["items_outstanding"].set(facts.get("ledger", {}).get("outstanding", 0))


class MetricsServer:
    """Serves ``/metrics`` on loopback in a thread while the context is open. Port 0 means any free port."""

    def __init__(self, metrics: RunMetrics, port: int) -> None:
        try:
            self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=metrics.registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"run.metrics_port {port} cannot be used: {error}; choose another port") from error
        self.url = f"http://127.0.0.1:{self._server.server_port}/metrics"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)


def _address(endpoint: str) -> str:
    return urlsplit(endpoint).netloc or endpoint
