"""What a run writes about itself: versioned events, what decided its steps, and readers of both.

`inflight.trace.events` is the schema of events, `inflight.trace.files` their files, `inflight.trace.records` the record
of the steps.
"""
