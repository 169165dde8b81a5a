"""Putting another value in the place of a node's result."""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.outputs import OutputPlaces

__all__ = ["put_in_place"]


def put_in_place(e: Emitter, outputs: OutputPlaces, old: ir.Value, result: ir.Value, *, new: bool) -> ir.Value:
    """Put `result` in the place of `old`, for all that use it and among the outputs; what stands there then.

    An output keeps its name: a result that is an output already, or that no node computes, gets a node of its own. The
    name of another value goes to the result if that is `new`, and does not stand in the place of others.
    """
    e.typed(result, old)
    if old.is_graph_output():
        name = old.name
        old.name = None
        if result.producer() is None or result.is_graph_output():
            result = e.op("Identity", result)
        result.name = name
    elif new:
        result.name, old.name = old.name, None
    outputs.replace(old, result)
    return result
