"""Lowerings of convolutions and their gradients, one module per method."""
