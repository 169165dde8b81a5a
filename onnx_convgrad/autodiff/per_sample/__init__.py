"""Gradients per sample: the axis of the samples in every value, and a reverse walk that does not sum over it."""
