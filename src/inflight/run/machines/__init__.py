"""Where the processes of a run are placed, and what memory they need."""
