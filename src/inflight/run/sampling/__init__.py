"""The sampling half of a run: groups are offered, sampled, scored and composed into batches."""
