"""LSTM, GRU and RNN with the batch first (`layout=1`), which ONNX Runtime does not run, with the sequence first."""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.frontend.opset.rewriter import Rewriter

_SWAPPED = (1, 0, 2)
_RESULTS = ((2, 0, 1, 3), _SWAPPED, _SWAPPED)
"""The order of the axes of Y, Y_h and Y_c with the batch first, among those with the sequence first."""


def batch_first(h: Rewriter) -> None:
    """Transpose X, the initial states and the results."""
    if not h.int("layout", 0):
        return
    h.drop("layout")
    inputs = list(h.node.inputs)
    for index in (0, 5, 6):  # X, initial_h, initial_c
        value = h.operand(index)
        if value is not None:
            inputs[index] = h.e.op("Transpose", value, perm=list(_SWAPPED))
    h.set_inputs(*inputs)
    for value, perm in zip(h.node.outputs, _RESULTS, strict=False):
        if value.name:
            _turn(h, value, perm)


def _turn(h: Rewriter, result: ir.Value, perm: tuple[int, ...]) -> None:
    """Let a Transpose take the place of a result."""
    node = ir.node("Transpose", [None], {"perm": list(perm)}, name=h.e.names.claim(f"{result.name}_Transpose"))
    h.redirect(result, node.outputs[0])
    node.replace_input_with(0, result)
    if result.shape is not None:
        result.shape = ir.Shape([result.shape[perm.index(axis)] for axis in range(len(perm))])
    h.e.graph.insert_after(h.node, node)
