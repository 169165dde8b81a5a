"""The stages of a transformation in order, from a model to its derivative graph."""
