"""Measurements that a user takes on their own machine, beside that machine's own limits: ``inflight bench``."""
