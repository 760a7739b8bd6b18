"""The receiving half of a weight update: the state machine, staging, commits, and following a stored run."""
