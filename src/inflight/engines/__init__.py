"""Engines other than our own: what an adapter says of one, how it is found, started, and attached to."""
