"""Weight updates: buckets and encodings, transports, the endpoint's state machine, and publishing."""
