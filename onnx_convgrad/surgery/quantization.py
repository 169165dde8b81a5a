"""Prepare a quantized model for training, and store the trained weights as integers again.

Quantization-aware training (Jacob et al. 2018, arXiv:1712.05877) updates float weights behind a quantizer. In the file that
is trained each stored integer weight becomes such a float master weight, and each int32 bias a float one; QLinearConv and
QLinearMatMul become Conv and MatMul between DequantizeLinear and QuantizeLinear. `store_integers` gives the trained
file the form that ONNX Runtime fuses into integer kernels: integer weights, int32 biases with the product of both scales.

With learned scales, the quantizers read `max(|scale|, least)`, so that a step never makes one negative or zero.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.names import check_names
from onnx_convgrad.errors import ModelError
from onnx_convgrad.frontend.quantizers import level_range
from onnx_convgrad.frontend.tidy import store
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.loop_bodies import name_inner_values
from onnx_convgrad.ir.namespace import Namespace
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.notes import QUANTIZATION
from onnx_convgrad.ir.passes import RemoveUnused
from onnx_convgrad.ir.replace import OutputPlaces, put_in_place

MODES = ("qat", "lsq", "int8")
"""Quantization-aware training with fixed scales, with learned ones, and of 8-bit weights without float masters."""

LEAST_SCALE = 1e-8
"""The least scale that a quantizer uses while scales are learned."""

_SUFFIX = "_quantized"
"""ONNX Runtime's quantizer appends this to the name of a weight."""


def prepare(model: ir.Model, mode: str) -> list[str]:
    """Give a canonical model float master weights, in place; return the names of further parameters.

    These are the scales to learn, or the weights that stay integers.

    Raises:
        ArgumentError: The mode is unknown.
        ModelError: The model has no QuantizeLinear and DequantizeLinear that training could pass.
    """
    check_names([mode], MODES, "quantization")
    graph = model.graph
    _separate_products(graph)
    _add_masters(graph)
    if not any(is_op(node, "QuantizeLinear") for node in graph.all_nodes()):
        if any(is_op(node, "ConvInteger", "MatMulInteger") for node in graph.all_nodes()):
            raise ModelError(
                "The model is quantized as it runs (ConvInteger, MatMulInteger): no quantizer belongs to its weights.",
                hint="Train without quantization its biases and other floating-point values, or take the float model.",
            )
        raise ModelError(
            "The model has no quantizers (QuantizeLinear, QLinearConv, QLinearMatMul) to train with.",
            hint="Insert them with onnx_convgrad.transforms.insert_quantizers, which calibrates them on data.",
        )
    model.metadata_props[QUANTIZATION] = mode
    if mode == "int8":
        stored = _store_levels(graph, (ir.DataType.INT8, ir.DataType.UINT8))
        RemoveUnused()(model)
        return stored
    return _learn_scales(graph) if mode == "lsq" else []


def _separate_products(graph: ir.Graph) -> None:
    """Write QLinearConv and QLinearMatMul as float operators between DequantizeLinear and QuantizeLinear."""
    writer = Emitter(graph)
    for g in (graph, *graph.subgraphs()):
        e = writer if g is graph else writer.of_body(g)
        _separate(graph, e, [node for node in g if is_op(node, "QLinearConv", "QLinearMatMul")])
        if g is not graph:
            for node in e.emitted:
                if not node.outputs[0].name:
                    name_inner_values(e, node)


def _separate(graph: ir.Graph, e: Emitter, nodes: list[ir.Node]) -> None:
    outputs = OutputPlaces(e.graph)
    for node in nodes:
        n = Call(node)
        e.anchor, start = node, len(e.emitted)
        x, xs, xz, w, ws, wz, ys, yz, *bias = node.inputs
        conv = node.op_type == "QLinearConv"
        a = e.op("DequantizeLinear", x, xs, xz, axis=None if conv else -2)
        b = e.op("DequantizeLinear", w, ws, wz, axis=0 if conv else -1)
        added = []
        if bias and bias[0] is not None and xs is not None and ws is not None:
            scale = _stored_product(graph, e, xs, ws)
            added = [e.op("DequantizeLinear", bias[0], scale, axis=0)]
        y = e.op("Conv" if conv else "MatMul", a, b, *added, **n.attributes())
        if n.y.shape is not None:
            y.shape = n.y.shape
        q = e.op("QuantizeLinear", y, ys, yz)
        for count, made in enumerate(e.emitted[start:], 1):
            made.name = f"{node.name}/{made.op_type}_{count}"
        put_in_place(e, outputs, node.outputs[0], q, new=True)
        e.graph.remove(node, safe=True)


def _stored_product(graph: ir.Graph, e: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
    """The product of two scales, stored if both are."""
    if a.const_value is None or b.const_value is None:
        return e.mul(a, b)
    name = e.names.claim(f"{b.name}_bias")
    return store(graph, name, np.asarray(a.const_value.numpy() * b.const_value.numpy()))


def _add_masters(graph: ir.Graph) -> None:
    """Replace stored integers behind DequantizeLinear by float weights with a quantizer, and int32 by floats alone."""
    names, node_names = Namespace.of_values(graph), Namespace.of_nodes(graph)
    levels: dict[ir.Value, ir.Value] = {}
    for node in [node for node in graph.all_nodes() if is_op(node, "DequantizeLinear")]:
        x, scale = node.inputs[:2]
        if x is None or scale is None or x.const_value is None or scale.const_value is None or x.is_graph_input():
            continue
        if x.dtype == ir.DataType.INT32:
            result = node.outputs[0]
            free = (x.name or "").removesuffix(_SUFFIX)
            name = names.claim(free) if free not in names.used else result.name or ""
            result.name = None
            result.replace_all_uses_with(store(graph, name, dequantized(node)), replace_graph_outputs=True)
            _graph_of(node).remove(node, safe=True)
            continue
        if x not in levels:
            free = (x.name or "").removesuffix(_SUFFIX)
            master = store(graph, names.claim(free if free != x.name else f"{free}_float"), dequantized(node))
            quantizer = _quantizer_of(node, master, x)
            quantizer.name = node_names.claim(f"{master.name}/QuantizeLinear")
            quantizer.outputs[0].name = names.claim(f"{master.name}_levels")
            graph.insert_before(node if node.graph is graph else graph[0], quantizer)
            levels[x] = quantizer.outputs[0]
        node.replace_input_with(0, levels[x])
    for value in [v for v in graph.initializers.values() if not v.uses() and not v.is_graph_output()]:
        if not value.is_graph_input():
            del graph.initializers[value.name or ""]


def _graph_of(node: ir.Node) -> ir.Graph:
    assert isinstance(node.graph, ir.Graph), "functions are inlined"
    return node.graph


def _quantizer_of(node: ir.Node, master: ir.Value, levels: ir.Value) -> ir.Node:
    """The QuantizeLinear of which a DequantizeLinear is the reverse."""
    attributes = [node.attributes[name] for name in ("axis", "block_size") if name in node.attributes]
    if len(node.inputs) < 3 or node.inputs[2] is None:
        attributes.append(ir.AttrInt64("output_dtype", int(levels.dtype or ir.DataType.UINT8)))
    quantizer = ir.Node("", "QuantizeLinear", [master, *node.inputs[1:]], attributes, num_outputs=1)
    quantizer.outputs[0].shape, quantizer.outputs[0].type = levels.shape, levels.type
    return quantizer


def dequantized(node: ir.Node) -> np.ndarray:
    """The result of a DequantizeLinear of stored operands, in the type of its scale."""
    levels, dtype = array_of(node.inputs[0]), array_of(node.inputs[1]).dtype
    scale, zero = (spread_over(node, operand, levels.shape).astype(np.float64) for operand in (1, 2))
    return ((levels.astype(np.float64) - zero) * scale).astype(dtype)


def quantized(node: ir.Node, numbers: np.ndarray) -> np.ndarray:
    """The result of a QuantizeLinear for numbers: `clip(round(x / scale) + zero_point)`, half to even."""
    dtype = node.outputs[0].dtype or ir.DataType.UINT8
    low, high = level_range(dtype) or (0.0, 255.0)
    step, zero = (spread_over(node, operand, numbers.shape) for operand in (1, 2))
    ratio = _ratio(numbers, step.astype(numbers.dtype))
    if dtype.is_integer():
        ratio = np.rint(ratio) + zero
    levels: np.ndarray = np.clip(ratio, low, high).astype(dtype.numpy())
    return levels


def _ratio(numbers: np.ndarray, step: np.ndarray) -> np.ndarray:
    """The quotient; 0 where the step is 0, as the scale of a channel of zeros may be."""
    steps = np.broadcast_to(step, numbers.shape)
    quotient: np.ndarray = np.divide(numbers, steps, out=np.zeros_like(numbers), where=steps != 0)
    return quotient


def spread_over(node: ir.Node, operand: int, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """Scale (operand 1) or zero point (2) of a quantizer, for its stored tensor or one of another shape; floating."""
    given = node.inputs[operand] if len(node.inputs) > operand else None
    entries = np.zeros((), np.float32) if given is None else array_of(given)
    entries = entries.astype(np.result_type(entries.dtype, np.float32))
    return _spread(node, entries, array_of(node.inputs[0]).shape if shape is None else shape)


def _spread(node: ir.Node, entries: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Entries per tensor, axis or block of a quantizer, broadcast against an array of `shape`."""
    axis, block = Call(node).int("axis", 1), _block(node)
    if block and entries.ndim:
        return np.repeat(entries, block, axis=axis)[tuple(slice(size) for size in shape)]
    if entries.size == 1:
        return entries.reshape(())
    return entries.reshape([-1 if i == axis % len(shape) else 1 for i in range(len(shape))])


def _block(node: ir.Node) -> int:
    return Call(node).int("block_size", 0)


def array_of(value: ir.Value | None) -> np.ndarray:
    """The numbers of a stored operand."""
    assert value is not None, "the operand is given"
    assert value.const_value is not None, "the operand is stored"
    return value.const_value.numpy()


def _learn_scales(graph: ir.Graph) -> list[str]:
    """Let quantizers read the magnitude of their scales; return the names of the scales."""
    quantizers = [node for node in graph.all_nodes() if is_op(node, "QuantizeLinear")]
    scales = [node.inputs[1] for node in quantizers]
    learned = [v for v in dict.fromkeys(scales) if v is not None and v.const_value is not None]
    e = Emitter(graph)
    e.anchor = next(iter(graph))
    for scale in learned:
        uses = list(scale.uses())
        least = e.op("Max", e.op("Abs", scale), LEAST_SCALE)
        for use in uses:
            use.node.replace_input_with(use.idx, least)
        for node in e.emitted[-2:]:
            node.name = f"{scale.name}/{node.op_type}"
    return [scale.name or "" for scale in learned]


# -- export ------------------------------------------------------------------------------------------------------------


def store_integers(model: ir.Model) -> None:
    """Fold the quantizers of a trained model, in place, if `prepare` made it."""
    if model.metadata_props.pop(QUANTIZATION, None) is None:
        return
    graph = model.graph
    fold_scales(graph)
    _store_levels(graph)
    names = Namespace.of_values(graph)
    for node in [node for node in graph.all_nodes() if is_op(node, "Conv", "Gemm") and len(node.inputs) > 2]:
        _store_bias(graph, node, names)
    RemoveUnused()(model)


def _store_levels(graph: ir.Graph, kinds: Collection[ir.DataType] | None = None) -> list[str]:
    """Replace quantizers of stored numbers by their levels of some types, all by default, in place; return their names."""
    names, found = Namespace.of_values(graph), []
    for node in [node for node in graph if is_op(node, "QuantizeLinear")]:
        x, old = node.inputs[0], node.outputs[0]
        if x is None or x.const_value is None or x.is_graph_input() or (kinds and old.dtype not in kinds):
            continue
        new = store(graph, names.claim(f"{x.name}{_SUFFIX}"), quantized(node, array_of(x)), old.dtype)
        found.append(new.name or "")
        first: ir.Node | None = None
        for use in list(old.uses()):
            use.node.replace_input_with(use.idx, new)
            if first is None:
                first = use.node
            elif [*use.node.inputs] == [*first.inputs]:
                use.node.outputs[0].replace_all_uses_with(first.outputs[0], replace_graph_outputs=True)
        graph.remove(node, safe=True)
    return found


def fold_scales(graph: ir.Graph) -> None:
    """Replace the magnitude of a learned scale by a stored number."""
    for node in [node for node in graph if is_op(node, "Max")]:
        inner = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
        scale = inner.inputs[0] if is_op(inner, "Abs") else None
        if inner is None or scale is None or scale.const_value is None or inner.name != f"{scale.name}/Abs":
            continue
        numbers = np.maximum(np.abs(array_of(scale)), np.asarray(LEAST_SCALE, array_of(scale).dtype))
        scale.const_value = ir.Tensor(numbers, name=scale.name)
        node.outputs[0].replace_all_uses_with(scale)
        graph.remove([node, inner], safe=True)


def _store_bias(graph: ir.Graph, node: ir.Node, names: Namespace) -> None:
    """Store the float bias of a product of dequantized operands as int32, in units of the product of their scales.

    Where the scale of a weight is zero, or so small that the bias exceeds int32, the weight gets a larger one, which changes
    no product by more than the 2^-23th part of the bias. Behind data with the scale zero a bias stays floating.
    """
    x, w, bias = node.inputs[:3]
    operands = [None if v is None else v.producer() for v in (x, w)]
    if bias is None or bias.const_value is None or not all(is_op(op, "DequantizeLinear") for op in operands):
        return
    scales = [op.inputs[1] for op in operands if op is not None]
    if any(s is None or s.const_value is None for s in scales) or any(_block(op) for op in operands if op is not None):
        return
    back, whole = operands[1], array_of(scales[1]).size == 1
    reach, numbers = np.iinfo(np.int32), array_of(bias).astype(np.float64)
    step = float(array_of(scales[0]).reshape(()))
    units = step * array_of(scales[1]).reshape(-1)
    if not whole and units.shape != numbers.shape:
        return
    lacking = np.abs(numbers) > units * (reach.max / 2)
    if lacking.any():
        if not step or back is None or (x := back.inputs[0]) is None or x.const_value is None:
            return
        least = np.abs(numbers) / (step * (reach.max / 2))
        wide = np.maximum(units / step, least.max() if whole else least)
        units = step * _rescaled(graph, names, _own(node, back, names), wide)
    scale = np.asarray(units.reshape(()) if whole else units, np.float32)
    levels = np.clip(np.rint(_ratio(numbers, scale.astype(np.float64))), reach.min, reach.max).astype(np.int32)
    stored = store(graph, names.claim(f"{bias.name}{_SUFFIX}"), levels)
    unit = store(graph, names.claim(f"{bias.name}_scale"), scale)
    zero = store(graph, names.claim(f"{bias.name}_zero_point"), np.zeros(scale.shape, np.int32))
    back = ir.Node("", "DequantizeLinear", [stored, unit, zero], [ir.AttrInt64("axis", 0)], num_outputs=1,
                   name=f"{node.name}/bias")  # fmt: skip
    back.outputs[0].name, back.outputs[0].shape = names.claim(f"{bias.name}_real"), bias.shape
    back.outputs[0].type = bias.type
    _graph_of(node).insert_before(node, back)
    node.replace_input_with(2, back.outputs[0])


def _own(node: ir.Node, back: ir.Node, names: Namespace) -> ir.Node:
    """The DequantizeLinear of the weight of a node; a copy if it has other readers."""
    real = back.outputs[0]
    if len(real.uses()) == 1:
        return back
    copy = ir.Node(
        "", "DequantizeLinear", back.inputs, back.attributes.values(), num_outputs=1, name=f"{node.name}/weight"
    )
    y = copy.outputs[0]
    y.name, y.shape, y.type = names.claim(real.name or ""), real.shape, real.type
    _graph_of(node).insert_before(node, copy)
    node.replace_input_with(1, y)
    return copy


def _rescaled(graph: ir.Graph, names: Namespace, back: ir.Node, scale: np.ndarray) -> np.ndarray:
    """Store the levels of a weight for other scales of its channels, in place; return the scales."""
    numbers, n = dequantized(back).astype(np.float64), Call(back)
    x, old = n["x"], n["x_scale"]
    low, high = level_range(x.dtype or ir.DataType.INT8) or (-128.0, 127.0)
    exact = np.rint(_ratio(numbers, _spread(back, scale, numbers.shape))) + spread_over(back, 2)
    levels = np.clip(exact, low, high).astype(array_of(x).dtype)
    fresh = scale.reshape(array_of(old).shape).astype(array_of(old).dtype)
    back.replace_input_with(0, store(graph, names.claim(x.name or "levels"), levels, x.dtype))
    back.replace_input_with(1, store(graph, names.claim(old.name or "scale"), fresh))
    return fresh.reshape(-1).astype(np.float64)
