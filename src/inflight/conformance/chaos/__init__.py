"""Chaos: seeded schedules of faults against weight updates, and a judge who knows from outside what must stay true.

``python -m inflight.conformance.chaos --schedules 2000`` runs a campaign; a schedule that fails is run again by its
seed. Importing it has no effect.
"""
