"""Who takes part in a run: admission, the verdict on each step, the next generation of ranks."""
