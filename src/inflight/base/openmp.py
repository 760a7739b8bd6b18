"""An OpenMP setting for threads that share cores with other processes."""

WAIT_ASLEEP = {"OMP_WAIT_POLICY": "PASSIVE"}
"""The environment variable that makes a thread sleep while it waits for other threads of its process.

By default, a waiting thread first keeps its core busy, even while another process occupies the core that the awaited
thread needs. On two cores that another process also uses, a step therefore takes longer with two threads than with one
(`benchmarks/threads.py`). With ``PASSIVE``, the step takes as long as with one thread; if no other process is busy, it
takes 0.6 times as long.
"""
