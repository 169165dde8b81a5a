"""Peak memory: which forward values the gradients keep, and which are recomputed."""
