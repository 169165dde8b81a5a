"""Gradients of each sample of a batch: where the samples lie in every value, and the reverse walk that keeps them apart."""

from onnx_convgrad.autodiff.per_sample import operators, operators_layout

__all__ = ["operators", "operators_layout"]
