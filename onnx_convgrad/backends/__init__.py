"""Rewrites for execution providers: forms that they need or are faster with, and workarounds for faults."""
