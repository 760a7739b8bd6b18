"""The protocol between PipelineRL's trainer and its inference servers, both ways round.

The source of every message is PipelineRL's own code at 58d3934: ``finetune_loop.py``, ``vllm1.py``, ``async_llm.py``
and ``torch_utils.py``.
"""
