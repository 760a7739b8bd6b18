"""Weight movement: manifest and buckets, transports, the endpoint's state machine, and publishing."""
