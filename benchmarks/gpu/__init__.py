"""Measure correctness and speed on a GPU."""
