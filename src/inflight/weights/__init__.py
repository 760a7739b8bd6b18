"""Weights on the move: manifest and buckets, transports, the endpoint's state machine, and publishing."""
