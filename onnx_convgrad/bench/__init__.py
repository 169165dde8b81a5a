"""Measurements of steps and layers, and of speeds for the cost model (tool: may change in a minor version)."""
