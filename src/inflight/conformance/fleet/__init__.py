"""A fleet under faults: seeded schedules inject faults into weight updates, and a judge observes the servers from
outside.

``inflight check fleet`` runs such schedules against any server.
"""
