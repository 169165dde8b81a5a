"""Gradients per sample: the axis of the samples in every value, and a reverse walk that does not sum over it."""

from onnx_convgrad.autodiff.per_sample import axis_rules as axis_rules
from onnx_convgrad.autodiff.per_sample import axis_rules_layout as axis_rules_layout
