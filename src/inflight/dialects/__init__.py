"""Adapters to the protocols of other codebases: vLLM, SGLang, Tinker, PipelineRL, Fast-LLM and NVIDIA Dynamo."""
