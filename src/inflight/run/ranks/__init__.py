"""The trainer ranks of a run: their processes, their messages, and how they publish."""
