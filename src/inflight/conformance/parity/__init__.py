"""``inflight check parity``: how much an engine's logprobs differ from a trainer's with the same weights, and why."""
