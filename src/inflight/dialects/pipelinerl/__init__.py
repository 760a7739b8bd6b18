"""The protocol between PipelineRL's trainer and its inference servers, for either side.

The messages follow PipelineRL's code at 58d3934: ``finetune_loop.py``, ``vllm1.py``, ``async_llm.py``
and ``torch_utils.py``.
"""
