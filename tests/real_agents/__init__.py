"""Programs that people use as agents, against the recording proxy: make test-agents installs and runs them."""
