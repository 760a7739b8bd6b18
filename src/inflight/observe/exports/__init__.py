"""What other programs show of a run: traces for Perfetto, spans for OpenTelemetry, metrics for Prometheus.

All of it is made of the run's events, and of nothing else.
"""
