"""Correct inferred sizes where operands of two symbolic sizes are broadcast: either may be 1 at run time.

onnx-shape-inference takes the first of two symbols for the size of the result. Here the result gets a symbol of its own,
the same one wherever the same symbols are broadcast.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import sha256

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext, registry

from onnx_convgrad.autodiff.factors import every_axis
from onnx_convgrad.autodiff.registry import rules
from onnx_convgrad.frontend.shapes.shape_rules_layout import Infer
from onnx_convgrad.ir.call import signature
from onnx_convgrad.ir.nodes import is_op

_LONGEST = 40
_PARTS: dict[str, frozenset[str]] = {}
"""Symbol of a broadcast size -> the symbols that it is broadcast from."""

Size = int | ir.SymbolicDim


def corrections() -> Iterator[tuple[str, int, Callable[[Infer], Infer]]]:
    """(operator, opset, change of the rule of the library), for every rule of the operators that broadcast."""
    elementwise = [rule.op_type for rule in rules() if rule.factors is every_axis and not rule.domain]
    operands = {op_type: signature("", op_type)[0] for op_type in elementwise}
    alike = sorted(op_type for op_type, names in operands.items() if len(names) > 1 or names[0].endswith("..."))
    kept_axes = {**dict.fromkeys(alike, 0), "Expand": 0, "MatMul": 2}
    del kept_axes["PRelu"]  # the data are never broadcast to the slope
    for op_type, kept in kept_axes.items():
        for since in dict.fromkeys(registry.version_boundaries("", op_type)):
            yield op_type, since, partial(_corrected, kept=kept)


def _corrected(original: Infer, kept: int) -> Infer:
    """The rule of the library, and then the correction for operators that broadcast all but the `kept` last axes."""

    def infer(context: ShapeInferenceContext, node: ir.Node) -> None:
        y = node.outputs[0]
        if y.shape is not None:  # else the library takes an earlier correction for a declared name of the first size
            y.shape = ir.Shape([None if isinstance(d, ir.SymbolicDim) and d.value in _PARTS else d for d in y.shape])
        original(context, node)
        operands = node.inputs if node.op_type != "Expand" else (node.inputs[0], _shaped(node.inputs[1]))
        shapes = [v.shape for v in operands if v is not None and v.shape is not None]
        if y.shape is None or len(shapes) < 2:
            return
        dims = list(y.shape)
        for axis in range(len(dims) - kept):
            from_end = len(dims) - axis
            dims[axis] = _broadcast(dims[axis], [shape[-from_end] for shape in shapes if len(shape) >= from_end])
        if any(new is not old for new, old in zip(dims, y.shape, strict=True)):
            y.shape = ir.Shape(dims)

    return infer


def _shaped(operand: ir.Value | None) -> ir.Value | None:
    """The value whose shape an operand holds, if it is the result of a Shape."""
    node = None if operand is None else operand.producer()
    return node.inputs[0] if is_op(node, "Shape") and not node.attributes else None


def _broadcast(inferred: Size, sizes: Sequence[Size]) -> Size:
    """The size that several sizes are broadcast to: the `inferred` one, unless different symbols are among them."""
    if isinstance(inferred, int):
        return inferred
    names = [size.value for size in sizes if isinstance(size, ir.SymbolicDim) and size.value is not None]
    parts = {name: _PARTS.get(name, frozenset([name])) for name in names}
    whole = frozenset[str]().union(*parts.values())
    if len(parts) < 2 or any(isinstance(size, int) and size != 1 for size in sizes):
        return inferred
    covering = next((name for name, own in parts.items() if own == whole), None)
    name = covering or _symbol(whole)
    return inferred if name == inferred.value else ir.SymbolicDim(name)


def _symbol(parts: frozenset[str]) -> str:
    """A name for the size that these symbols are broadcast to, the same in every process."""
    words = "_or_".join(re.sub(r"\W+", "_", part) for part in sorted(parts))
    if len(words) > _LONGEST or not words.isascii():
        words = sha256(repr(sorted(parts)).encode()).hexdigest()[:12]
    name = f"_{words}"
    _PARTS[name] = parts
    return name
