"""Compute abstract gradient operators with plain ones: the lowerings, their cost, and the choice of the cheapest."""

from __future__ import annotations

MODULES = (
    "conv.spec",
    "conv.input_grad",
    "conv.input_grad",
    "conv.forward",
    "conv.boxes",
    "conv.input_grad_phases",
    "conv.depthwise_tiled",
    "conv.weight_grad",
    "conv.weight_grad_shift",
    "conv.depthwise",
    "conv.depthwise_bands",
    "conv.interleaved",
    "conv.depthwise_bands",
    "conv.per_sample",
    "conv.winograd",
    "conv.winograd",
    "conv.forward",
    "conv.covariance",
    "pool.max_grad",
)
"""The modules that declare lowerings; of equally cheap ones, the one declared first is taken."""
