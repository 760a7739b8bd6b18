"""Adapters to the protocols of other codebases: PipelineRL and NVIDIA Dynamo."""
