"""``inflight check parity``: how far an engine's logprobs are from a trainer's with the same weights, and why."""
