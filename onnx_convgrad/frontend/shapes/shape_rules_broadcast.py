"""Sizes of operands that are broadcast where two symbols meet: either may be 1 when the model runs.

onnx-shape-inference takes the first of two symbols for the size of the result. Here that is a symbol of its own, the same
one wherever the same symbols meet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext, registry

from onnx_convgrad.ir.nodes import is_op

__all__ = ["install"]

_NEWEST_OPSET = 28
_LONGEST = 40
_PARTS: dict[str, frozenset[str]] = {}
"""Symbol for several sizes that are broadcast -> the symbols of those."""

Infer = Callable[[ShapeInferenceContext, ir.Node], None]
Size = int | ir.SymbolicDim


def install() -> None:
    """Correct the rules of operators that broadcast."""
    for op_type, kept in _BROADCASTING.items():
        for version, original in list(_versions(op_type)):
            registry.register("", op_type, since_version=version)(_corrected(original, kept))


def _versions(op_type: str) -> Iterator[tuple[int, Infer]]:
    """The rules of an operator, each with the first opset that it is for."""
    last = None
    for version in range(1, _NEWEST_OPSET + 1):
        rule = registry.get("", op_type, version=version)
        if rule is not None and rule is not last:
            yield version, rule
        last = rule


def _corrected(original: Infer, kept: int) -> Infer:
    def infer(context: ShapeInferenceContext, node: ir.Node) -> None:
        original(context, node)
        y = node.outputs[0]
        operands = node.inputs if node.op_type != "Expand" else (node.inputs[0], _shaped(node.inputs[1]))
        shapes = [v.shape for v in operands if v is not None and v.shape is not None]
        if y.shape is None or len(shapes) < 2:
            return
        dims = list(y.shape)
        for axis in range(len(dims) - kept):
            from_end = len(dims) - axis
            dims[axis] = _met(dims[axis], [shape[-from_end] for shape in shapes if len(shape) >= from_end])
        if any(new is not old for new, old in zip(dims, y.shape, strict=True)):
            y.shape = ir.Shape(dims)

    return infer


def _shaped(operand: ir.Value | None) -> ir.Value | None:
    """The value that has a shape which is an operand, if that is told."""
    node = None if operand is None else operand.producer()
    return node.inputs[0] if is_op(node, "Shape") and not node.attributes else None


def _met(inferred: Size, sizes: Sequence[Size]) -> Size:
    """The size that several are broadcast to; what was `inferred`, unless different symbols meet."""
    if isinstance(inferred, int):
        return inferred
    names = [size.value for size in sizes if isinstance(size, ir.SymbolicDim) and size.value is not None]
    parts = {name: _PARTS.get(name, frozenset([name])) for name in names}
    whole = frozenset[str]().union(*parts.values())
    if len(parts) < 2 or any(isinstance(size, int) and size != 1 for size in sizes):
        return inferred
    held = next((name for name, own in parts.items() if own == whole), None)
    name = held or _symbol(whole)
    return inferred if name == inferred.value else ir.SymbolicDim(name)


def _symbol(parts: frozenset[str]) -> str:
    """A name for what is broadcast of these symbols, the same in every process."""
    words = "_or_".join(re.sub(r"\W+", "_", part) for part in sorted(parts))
    if len(words) > _LONGEST or not words.isascii():
        words = sha256(repr(sorted(parts)).encode()).hexdigest()[:12]
    name = f"_{words}"
    _PARTS[name] = parts
    return name


_BROADCASTING = {
    **dict.fromkeys(
        "Add And BitwiseAnd BitwiseOr BitwiseXor Div Equal Expand Greater GreaterOrEqual Less LessOrEqual Max Mean Min Mod"
        " Mul Or Pow Sub Sum Where Xor".split(),
        0,
    ),
    "MatMul": 2,
}
"""Operators that broadcast their operands -> how many of the last axes they do not."""
