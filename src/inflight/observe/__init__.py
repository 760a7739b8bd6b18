"""What is seen of a run: traces, trackers, exports and the page."""
