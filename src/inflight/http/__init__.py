"""The inference contract over HTTP: a client that implements `InferenceEndpoint`, and a server for any endpoint."""
