"""The traces that a run writes: versioned events, the record of its steps, and readers for both.

`events` is the schema of events, `files` reads and writes event files, and `records` reads and writes the record of the
steps.
"""
