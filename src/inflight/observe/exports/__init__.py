"""Exports of a run to other programs: traces for Perfetto, spans for OpenTelemetry, metrics for Prometheus.

All of them are derived only from the run's events.
"""
