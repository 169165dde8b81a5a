"""Apply a graph to many examples at once: a walk that gives every node one more axis, and how each operator takes it."""

from onnx_convgrad.autodiff.batching import layout_rules as layout_rules
from onnx_convgrad.autodiff.batching import rules as rules
