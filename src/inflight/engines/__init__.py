"""Inference engines: the embedded one, and shared code for starting other engines and attaching to them."""
