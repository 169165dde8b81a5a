"""Lowerings of pooling gradients."""
