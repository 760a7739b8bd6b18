"""The commands of ``inflight``, one module each."""
