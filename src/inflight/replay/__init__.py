"""Replays recorded runs: repeats training without engines or sampling on an engine, and imports other records."""
