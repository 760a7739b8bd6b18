"""The campaign of `inflight.conformance.fleet` over embedded servers, which are watched from inside."""
