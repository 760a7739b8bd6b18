"""vLLM's own routes, in front of any endpoint: its API for generation, and its four phases of a weight update."""
