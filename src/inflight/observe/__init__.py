"""Observability of a run: traces, trackers, exports and the web page."""
