"""The campaign of `inflight.conformance.fleet` over embedded servers, which are observed from inside."""
