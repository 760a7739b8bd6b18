"""What a run records: its journal, checkpoints, plots and progress."""
