"""Sizes, constants and nodes: what stands behind an `Emitter`, and what is known of a graph while it is built."""
