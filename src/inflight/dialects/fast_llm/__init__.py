"""The protocol between Fast-LLM's trainer and inference servers, for either side.

The streams and the broadcasts follow Fast-LLM's code at 7d61a1b: ``engine/training/streaming.py``,
``engine/distributed/distributed.py``, ``core/distributed.py`` and ``data/dataset/streaming.py``. Both sides connect
through Redis and a gloo group.
"""
