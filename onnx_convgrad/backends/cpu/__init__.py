"""Rewrites for ONNX Runtime's CPU provider, each with the measurement that it rests on."""

from collections.abc import Callable, Mapping

import onnx_ir as ir

from onnx_convgrad.ir.emit import Emitter

Form = Callable[[Emitter, ir.Node], ir.Value | None]
"""Computes the first result of a node in a faster way; `None` where it is not faster."""

Forms = Mapping[str, Form]
"""Operator -> its form."""
