"""An inference server that is not ours, and the endpoint around it that docs/inference-adapter.md explains."""
