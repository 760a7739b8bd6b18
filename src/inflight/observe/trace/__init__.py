"""What a run writes about itself: versioned events, what decided its steps, and readers of both.

`events` is the schema of events, `files` their files, `records` the record of the steps.
"""
