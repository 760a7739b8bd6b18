"""Inference engines: the embedded one, and what adapters share to start and attach to other engines."""
