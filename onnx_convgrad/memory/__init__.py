"""Peak memory: which values are kept for the gradients, and which are computed again."""
