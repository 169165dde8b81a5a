"""Correctness and speed on a GPU, in one table."""
