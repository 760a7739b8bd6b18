"""Movement of weights: manifests and buckets, transports, the endpoint's state machine, and publishing."""
