"""Membership of a run: admission, the verdict on each step, and the next generation of ranks."""
