"""A page that shows runs, while they run and afterwards: it reads the files of events and nothing else."""
