"""Scripts that make the tables of data/results. Run them from the root of a clone: `python -m experiments.digits`."""
