"""``inflight bench``: measurements on the user's machine, compared with that machine's limits."""
