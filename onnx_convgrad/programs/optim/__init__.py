"""Optimizers and learning-rate schedules, equal to PyTorch's."""
