"""What Prometheus reads of a run, and what the dashboard asks for."""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from inflight.errors import ConfigError
from inflight.exports.prometheus import MetricsServer, RunMetrics
from inflight.http.server import _Collected
from inflight.types import EngineStats
from inflight.wire import EndpointState, WeightVersion
from tests.exports.runs import whole_run

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


def scraped(metrics: RunMetrics) -> dict[str, float]:
    """Values by name and labels, read as Prometheus does."""
    with MetricsServer(metrics, 0) as server, urllib.request.urlopen(server.url, timeout=10) as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        sample.name + ("," if sample.labels else "") + ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items())):
        sample.value
        for sample in samples
    }  # fmt: skip


def test_metrics_are_what_the_events_say(tmp_path: Path) -> None:
    metrics = RunMetrics()
    for event in whole_run(tmp_path).heard:
        metrics.heard(event)
    found = scraped(metrics)
    assert found["inflight_run_info,directory=runs/letters,inflight=0.1.0,task=letters"] == 1
    expected = {
        "inflight_run_weight_version": 2,
        "inflight_run_steps_total": 3,
        "inflight_run_reward": 0.5,
        "inflight_run_lag_mean": 1.5,
        "inflight_run_lag_max": 2,
        "inflight_run_effective_sample_size": 0.9,
        "inflight_run_trained_tokens_total": 2100,
        "inflight_run_stale_tokens_total": 5,
        "inflight_run_completions_total": 8,
        "inflight_run_completion_tokens_total": 280,
        "inflight_run_groups,state=running": 2,
        "inflight_run_groups,state=waiting": 0,
        "inflight_run_items_total,outcome=trained": 4,
        "inflight_run_items_total,outcome=failed": 1,
        "inflight_run_items_outstanding": 0,
        "inflight_run_requests_total,endpoint=127.0.0.1:8001,outcome=ended": 4,
        "inflight_run_requests_total,endpoint=127.0.0.1:8002,outcome=failed": 1,
        "inflight_run_request_seconds_sum,endpoint=127.0.0.1:8001": 7.5,
        "inflight_run_publishes_total,outcome=applied": 3,
        "inflight_run_publish_seconds_count,part=wire": 3,
        "inflight_run_publish_seconds_sum,part=pause": pytest.approx(0.15),
        "inflight_run_published_bytes_total": 2700,
        "inflight_run_servers,state=healthy": 1,
        "inflight_run_servers,state=dead": 1,
        "inflight_run_failed_episodes_total,reason=TimeoutError": 1,
        "inflight_run_failures_total": 1,
        "inflight_run_train_seconds_sum": pytest.approx(4.5),
    }
    assert {name: found.get(name) for name in expected} == expected


def test_a_port_that_is_taken_is_refused_with_its_number() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"run\.metrics_port {port} cannot be used: .*choose another one"):
            MetricsServer(RunMetrics(), port)


def test_the_dashboard_asks_for_metrics_and_labels_that_exist(tmp_path: Path) -> None:
    run, server = RunMetrics(), WeightVersion(version=1, state=EndpointState.READY)
    for event in whole_run(tmp_path).heard:
        run.heard(event)
    families = [*run.registry.collect(), *_Collected(server, EngineStats(*range(8), *range(3))).collect()]
    labels: dict[str, set[str]] = {}
    for family in families:
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
        if family.type == "counter":
            labels.setdefault(f"{family.name}_total", set())
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    targets = [target for panel in panels for target in panel["targets"]]
    queries = [target["expr"] for target in targets] + [it["definition"] for it in dashboard["templating"]["list"][1:]]
    asked = {name for query in queries for name in re.findall(r"inflight_\w+", query)}
    assert asked <= labels.keys()
    families_of_run = {re.sub(r"_(total|bucket|sum|count|created)$", "", name) for name in labels if "_run_" in name}
    shown = {re.sub(r"_(total|bucket|sum|count|created)$", "", name) for name in asked if "_run_" in name}
    assert families_of_run - shown == {
        "inflight_run_trained_tokens_per_second",
        "inflight_run_completion_tokens_per_second",
    }, "means since the run began, which rates replace"
    for target in targets:
        known = set.union(*(labels[name] for name in re.findall(r"inflight_\w+", target["expr"]))) | {"instance"}
        used = re.findall(r"{{(\w+)}}", target["legendFormat"]) + re.findall(r"by \((\w+)\)", target["expr"])
        assert set(used) <= known, target
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in dashboard["panels"]})
