"""What a run writes about itself: versioned events, the files that hold them, and readers of both.

`inflight.trace.events` is the schema, `inflight.trace.files` the files.
"""
