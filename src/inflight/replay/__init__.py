"""Replaying recorded runs: repeating training without engines or sampling on an engine, and importing other records."""
