"""What episodes play in: environments and the tools that they offer to a model."""
