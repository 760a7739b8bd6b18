"""A fleet under faults: seeded schedules of faults during weight updates, and a judge that observes them from outside.

``inflight check fleet`` runs it against any server.
"""
