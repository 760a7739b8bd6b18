"""The inference contract over HTTP: a client that is an endpoint, a server that serves any endpoint."""
