"""How the threads of a process share cores with other processes."""

WAIT_ASLEEP = {"OMP_WAIT_POLICY": "PASSIVE"}
"""The environment variable with which a thread sleeps while it waits for the other threads of its process.

By default it keeps its core busy, also while another process has the core that the awaited thread needs. On two cores,
two threads of a trainer next to a busy process then took seven times as long as a single thread. Asleep they take as
long as one, and 0.6 of it once the other process is idle.
"""
