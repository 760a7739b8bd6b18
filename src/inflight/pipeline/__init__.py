"""The run: actors keep endpoints full, workers train on what is fresh, weights are published without stopping."""
