"""Engines other than our own: what an adapter says of one, and how to find, start and attach to them."""
