"""Checks of names and numbers that callers give, and a function that runs once."""
