"""Rewrites that an execution provider needs or is faster with."""
