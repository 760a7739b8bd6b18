"""``inflight bench``: measurements on the user's machine, compared with the machine's own limits."""
