"""Which samples make a step, in which order, and how they arrive."""
