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
from inflight.observe.exports.prometheus import MetricsServer, RunMetrics
from tests.exports.runs import whole_run
from tests.run.runs import RunProcess

pytestmark = pytest.mark.timeout(300)

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
        metrics.count(event)
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
        with pytest.raises(ConfigError, match=rf"run\.metrics_port {port} cannot be used: .*choose another port"):
            MetricsServer(RunMetrics(), port)


# ---------------------------------------------------------------------------------------------------------------
# The dashboard and the documents

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> dict[str, set[str]]:
    """The labels of every sample that a real run and its server have, by name; empty where none has been set yet."""
    run = RunProcess(tmp_path_factory.mktemp("run"), model_dir, "--run.num_steps", "100000", "--run.metrics_port", "0")
    try:
        run.wait_for_steps(1)
        (url,) = re.findall(r"metrics for Prometheus at (\S+)", run.output())
        texts = []
        for address in (url, *(f"{server}/metrics" for server in run.server_urls())):
            with urllib.request.urlopen(address, timeout=10) as answer:
                texts.append(answer.read().decode())
    finally:
        run.kill()
    families = [family for text in texts for family in text_string_to_metric_families(text)]
    found = {f"{it.name}{suffix}": set[str]() for it in families for suffix in SUFFIXES.get(it.type, ("",))}
    on_paper = RunMetrics()
    for event in whole_run(tmp_path_factory.mktemp("paper")).heard:
        on_paper.count(event)
    for family in (*families, *on_paper.registry.collect()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_the_dashboard_asks_for_metrics_and_labels_that_a_real_run_and_its_server_have(
    labels: dict[str, set[str]],
) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", [])]
    variables = dashboard["templating"]["list"][1:]
    assert all(it["definition"] == it["query"]["query"] for it in variables)
    for target in [*targets, *({"expr": it["definition"], "legendFormat": ""} for it in variables)]:
        names = re.findall(r"inflight_\w+", target["expr"])
        assert names and set(names) <= labels.keys(), target
        assert all(
            name.endswith(("_total", *SUFFIXES["histogram"])) for name in re.findall(r"rate\((\w+)", target["expr"])
        )
        for name, matchers in re.findall(r"(inflight_\w+){(.*?)}", target["expr"]):
            assert set(re.findall(r"(\w+)[=!][=~]?\"", matchers)) <= labels[name] | {"instance"}, target
        grouped = [word for words in re.findall(r"by \((.*?)\)", target["expr"]) for word in words.split(", ")]
        shown = re.findall(r"{{(\w+)}}", target["legendFormat"])
        for name in names:
            assert {*grouped, *shown} <= labels[name] | {"instance"}, target
        assert not grouped or set(shown) <= set(grouped), "other labels are gone"


def test_the_dashboard_shows_every_metric_of_a_run_and_lays_no_panel_on_another(labels: dict[str, set[str]]) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    asked = set(re.findall(r"inflight_run_\w+", DASHBOARD.read_text()))
    families = {re.sub(r"_(total|bucket|sum|count|created)$", "", name) for name in labels if "_run_" in name}
    assert families - {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in asked} == {
        "inflight_run_trained_tokens_per_second",
        "inflight_run_completion_tokens_per_second",
    }, "means since the run began, which rates replace"
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in dashboard["panels"]})


def test_metrics_that_the_documents_name_exist_with_their_labels(labels: dict[str, set[str]]) -> None:
    packages = {path.name for path in (DASHBOARD.parents[1] / "src").iterdir()}
    histograms = {name.removesuffix("_bucket"): known for name, known in labels.items() if name.endswith("_bucket")}
    known = labels | histograms
    text = "".join(path.read_text() for path in DASHBOARD.parent.glob("*.md") if path.name != "errors.md")
    assert len(named := set(re.findall(r"`(inflight_\w*[a-z])`", text)) - packages) > 10
    assert named <= known.keys()
    assert all(label in known[name] for name, label in re.findall(r"`(inflight_\w+)`, by (\w+)", text))
