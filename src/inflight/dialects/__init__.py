"""Servers and trainers of other codebases that speak protocols of their own: PipelineRL's, and Nvidia Dynamo's."""
