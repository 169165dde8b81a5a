"""Correct the shape inference of onnx-shape-inference, so that inferred shapes are those that ONNX Runtime produces.

Pools: padding of `auto_pad=SAME_*` ignores dilation, a kernel that does not fit may still give a window, and in ceil
mode a window that would start in the end padding is dropped. Resize: sizes are products in float32, and under
`keep_aspect_ratio_policy` they are rounded and depend on all axes. ConvTranspose: see `_transposed`. Operators of training
domains are added.

onnx-shape-inference 0.4 infers with its one global registry and has no parameter for another one, so that the corrections
are registered there, which is its documented way to add rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext, registry

from onnx_convgrad.base.run_once import once
from onnx_convgrad.frontend.gradient_edges import GRADIENT, TRAINING_DOMAIN
from onnx_convgrad.frontend.shapes import shape_rules_broadcast, shape_rules_layout, shape_rules_ml
from onnx_convgrad.frontend.shapes.shape_rules_layout import Infer
from onnx_convgrad.frontend.shapes.shape_rules_memo import REMEMBERED, conv, remembered
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.convolution import window
from onnx_convgrad.ir.emit import DOMAIN, known
from onnx_convgrad.ir.pooling import POOLS, Pool

Size = int | ir.SymbolicDim
CorrectSizes = Callable[[ShapeInferenceContext, ir.Node, list[Size]], Sequence[Size]]


@once
def install() -> None:
    """Register the corrections, once."""
    registry.collect()
    for op_type, since, change in (
        *((name, since, _followed_by(correct)) for name, since, correct in shape_rules_layout.CORRECTIONS),
        *shape_rules_broadcast.corrections(),
        *((name, since, _sizes_corrected(correct)) for name, since, correct in _SIZES),
        *((name, since, remembered) for name, since in REMEMBERED),
        ("Conv", 1, conv),
        ("Concat", 4, _of_short_vectors),
        ("Reshape", 5, _to_few_axes),
        *((name, 7, _of_64_bits) for name in ("Add", "Mul", "Sub")),
    ):
        original = registry.get("", op_type, version=since)
        assert original is not None, op_type
        registry.register("", op_type, since_version=since)(change(original))
    for op_type, infer in shape_rules_ml.RULES.items():
        registry.register("ai.onnx.ml", op_type, since_version=1)(infer)
    registry.register(DOMAIN, GRADIENT, since_version=1)(_gradient)
    for op_type in ("Adagrad", "Adam", "Momentum"):
        registry.register(TRAINING_DOMAIN, op_type, since_version=1)(_optimizer)


_LONG = 1024
"""Smallest number of elements of a vector that are taken for data, not for sizes."""


def _of_short_vectors(original: Infer) -> Infer:
    """The rule of Concat without the elements of long vectors, for each of which the library makes a symbol."""

    def infer(context: ShapeInferenceContext, node: ir.Node) -> None:
        lengths = [v.shape[0] for v in node.inputs if v is not None and v.shape is not None and len(v.shape) == 1]
        total = sum(length for length in lengths if isinstance(length, int))
        if total <= _LONG or len(lengths) < len(node.inputs):
            original(context, node)
            return
        dtype = next((v.dtype for v in node.inputs if v is not None), None)
        context.set_shape_and_dtype(node.outputs[0], ir.Shape([sum(lengths)]), dtype)

    return infer


def _to_few_axes(original: Infer) -> Infer:
    """The rule of Reshape, with a dtype where the rank is unknown too, from which those of other values follow.

    Where the shape has absurdly many sizes there is no result: the library makes a symbol for each.
    """

    def infer(context: ShapeInferenceContext, node: ir.Node) -> None:
        sizes = node.inputs[1].shape if len(node.inputs) > 1 and node.inputs[1] is not None else None
        if not any(isinstance(count, int) and count > _LONG for count in sizes or ()):
            original(context, node)
            if node.outputs[0].dtype is None and node.inputs[0] is not None and node.inputs[0].dtype is not None:
                node.outputs[0].dtype = node.inputs[0].dtype

    return infer


def _of_64_bits(original: Infer) -> Infer:
    """The rule of arithmetic on sizes, with an unknown size for a number beyond 64 bits, which a loop could multiply on."""

    def infer(context: ShapeInferenceContext, node: ir.Node) -> None:
        try:
            original(context, node)
        finally:  # it notes the numbers, and fails to make a tensor of them
            numbers = context.get_symbolic_value(node.outputs[0])
            if numbers is not None and any(_is_endless(n) for n in numbers):
                context.set_symbolic_value(node.outputs[0], [context.new_symbolic_dim() for _ in numbers])

    return infer


def _is_endless(size: Size) -> bool:
    """Whether a number exceeds 64 bits, or an expression of symbols is long."""
    return not -(2**63) <= size < 2**63 if isinstance(size, int) else len(size.value or "") > _LONGEST


_LONGEST = 200
"""Most characters of an expression of sizes."""


def _gradient(_: ShapeInferenceContext, node: ir.Node) -> None:
    """A derivative has the dtype and the shape of its variable."""
    _like(node.outputs, node.inputs)


def _optimizer(_: ShapeInferenceContext, node: ir.Node) -> None:
    """Results: new tensors, then new states. Operands: R, T, tensors, gradients, states."""
    count = (len(node.inputs) - 2) // (3 if node.op_type != "Adam" else 4)
    _like(node.outputs, (*node.inputs[2 : 2 + count], *node.inputs[2 + 2 * count :]))


def _like(values: Sequence[ir.Value], likes: Sequence[ir.Value | None]) -> None:
    """Give values the dtypes and shapes of others, where they have none."""
    for value, like in zip(values, likes, strict=False):
        if like is not None:
            value.type = value.type or like.type
            value.shape = like.shape if value.shape is None else value.shape


def _followed_by(correct: Infer) -> Callable[[Infer], Infer]:
    """The rule of the library, and then a correction."""

    def change(original: Infer) -> Infer:
        def infer(context: ShapeInferenceContext, node: ir.Node) -> None:
            original(context, node)
            correct(context, node)

        return infer

    return change


def _sizes_corrected(correct: CorrectSizes) -> Callable[[Infer], Infer]:
    """The rule of the library, and then a correction of sizes where the ranks of operand and results are equal."""

    def infer(context: ShapeInferenceContext, node: ir.Node) -> None:
        y, x = node.outputs[0], node.inputs[0]
        if y.shape is None or x is None or x.shape is None or len(x.shape) != len(y.shape):
            return
        shape = ir.Shape(correct(context, node, list(y.shape)))
        for value in node.outputs:
            value.shape = shape

    return _followed_by(infer)


def _pool(context: ShapeInferenceContext, node: ir.Node, dims: list[Size]) -> Sequence[Size]:
    x = node.inputs[0]
    assert x is not None
    pool = Pool.of(Call(node), x)
    if len(dims) != 2 + pool.rank:
        return dims
    for axis in range(pool.rank):
        count = pool.windows(axis)
        if count is not None:
            dims[2 + axis] = max(count, 0)
        elif pool.pads is None and pool.dilations[axis] != 1:
            dims[2 + axis] = context.new_symbolic_dim()
        elif pool.ceil and (pool.pads is None or pool.pads[axis][1] + pool.strides[axis] > pool.span(axis)):
            dims[2 + axis] = context.new_symbolic_dim()  # the last window may be dropped
    return dims


def _resize(context: ShapeInferenceContext, node: ir.Node, dims: list[Size]) -> Sequence[Size]:
    n = Call(node)
    sizes_in = list(n["X"].shape or ())
    axes = [a % len(dims) for a in n.ints("axes") or range(len(dims))]
    scales, sizes = constant_of(n.get("scales")), constant_of(n.get("sizes"))
    if scales is not None and scales.size == len(axes):
        for axis, scale in zip(axes, scales, strict=True):
            dims[axis] = _scaled(context, sizes_in[axis], dims[axis], scale)
    elif n.get("sizes") is not None and (policy := n.string("keep_aspect_ratio_policy", "stretch")) != "stretch":
        have = [known(sizes_in[axis]) for axis in axes]
        scale = None
        if sizes is not None and sizes.size == len(axes) and all(have):
            ratios = sizes.astype(np.float32) / np.asarray(have, np.float32)
            scale = np.min(ratios) if policy == "not_larger" else np.max(ratios)
        for axis, size in zip(axes, have, strict=True):
            if scale is None or size is None:
                dims[axis] = context.new_symbolic_dim()
            else:  # the nearest whole number, halves away from zero, as C++'s std::round
                dims[axis] = int(np.floor(np.float64(scale * np.float32(size)) + 0.5))
    return dims


def _scaled(context: ShapeInferenceContext, size: Any, inferred: Size, scale: Any) -> Size:
    if isinstance(size, int):
        return int(np.float32(scale) * np.float32(size))
    exact = float(scale) * 64 == int(float(scale) * 64)  # then no rounding can change the floor
    return inferred if exact else context.new_symbolic_dim()


def _transposed(context: ShapeInferenceContext, node: ir.Node, dims: list[Size]) -> Sequence[Size]:
    """Under `auto_pad=SAME_*`, a kernel that is shorter than its stride gives fewer rows: the end is not filled up."""
    n = Call(node)
    x, w, rank = n["X"].shape, n["W"].shape, len(dims) - 2
    kernel = n.ints("kernel_shape") or [known(d) for d in list(w or ())[2:]]
    if not n.string("auto_pad", "NOTSET").startswith("SAME") or n.ints("output_shape") or len(kernel) != rank:
        return dims
    win, extras = window(n, rank), n.ints("output_padding") or (0,) * rank
    for axis, (k, s, d, extra) in enumerate(zip(kernel, win.strides, win.dilations, extras, strict=True)):
        short = s if k is None else s - extra - d * (k - 1) - 1
        size = None if x is None else known(x[2 + axis])
        if short > 0:
            dims[2 + axis] = context.new_symbolic_dim() if k is None or size is None else size * s - short
    return dims


_SIZES: tuple[tuple[str, int, CorrectSizes], ...] = (
    *((name, 1, _pool) for name in POOLS),
    ("Resize", 10, _resize),
    ("ConvTranspose", 1, _transposed),
)
