"""Replays recorded runs: repeats training without engines, repeats sampling on an engine, and imports rollouts from
other frameworks."""
