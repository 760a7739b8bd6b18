"""SGLang's own routes, in front of any endpoint: its API for generation, and its updates from disk."""
