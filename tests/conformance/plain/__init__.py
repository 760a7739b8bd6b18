"""A server that is independent of inflight, and the adapters that docs/inference-adapter.md explains."""
