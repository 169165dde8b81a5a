"""Training programs: losses, optimizers, and the graphs that put them together."""
