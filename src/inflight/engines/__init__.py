"""Inference engines: the embedded engine, and shared code that starts other engines and attaches to them."""
