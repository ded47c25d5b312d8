"""Training data: which samples make a step, in which order, and how a rank loads them."""
