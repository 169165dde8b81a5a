"""The sides of the training-step benchmark: one process each, for separate memory and environments."""
