"""Data parallelism: one rank's replica of the model, and the reduction of its gradient over all ranks."""
