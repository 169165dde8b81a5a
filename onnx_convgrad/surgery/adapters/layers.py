"""The layers of a model that can have a low-rank adapter, and the adapters that a model has.

A layer is a product of a float activation and a stored weight, possibly quantized, however many nodes compute it. The
metadata of a model list its adapters, and the graph must say what the metadata says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff import layers as products
from onnx_convgrad.base.forms import NAME, NATURAL, NUMBER, Is, check_form, parse_json
from onnx_convgrad.errors import ModelError
from onnx_convgrad.frontend.stored_weight import StoredWeight, read_dtype, stored_weight
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.notes import ADAPTERS

Kind = Literal["Conv", "MatMul", "left MatMul", "Gather"]

_INTEGER = ("ConvInteger", "MatMulInteger")


@dataclass(frozen=True, slots=True, eq=False)
class AdaptableLayer:
    """A layer that can have an adapter.

    Attributes:
        node: The node that reads the weight.
        kind: `"MatMul"` computes `x W`, `"left MatMul"` computes `W x`; a Gemm is a `"MatMul"`.
        x: The activation, or the indices of a Gather.
        y: The result, to which the adapter's path is added.
        weight: The weight.
        shape: The shape of W: `[K, N]`, `[M, K]`, `[V, D]`, or `[M, C/group, *kernel]`.
        dtype: The type of the adapter's weights.
        transposed: Whether W is the transpose of what `weight` says, as in a Gemm with transB.
        factor: The factor of the product: alpha of a Gemm.
        group: Groups of a convolution.
    """

    node: ir.Node
    kind: Kind
    x: ir.Value
    y: ir.Value
    weight: StoredWeight
    shape: tuple[int, ...]
    dtype: ir.DataType
    transposed: bool = False
    factor: float = 1.0
    group: int = 1
    attributes: tuple[ir.Attr, ...] = field(default=())

    @property
    def names(self) -> list[str]:
        """The names by which a caller can name the layer."""
        return [name for name in (self.weight.root.name, self.node.name) if name]

    @property
    def operand(self) -> int:
        """The position of the weight among the operands."""
        return 0 if self.kind in ("left MatMul", "Gather") else 1

    @property
    def is_table(self) -> bool:
        """Whether the weight is a table of rows that the layer picks."""
        return self.kind == "Gather"

    @property
    def operators(self) -> tuple[str, str]:
        """The operators of the adapter's path, with A and with B."""
        return ("Conv", "Conv") if self.kind == "Conv" else ("Gather" if self.is_table else "MatMul", "MatMul")

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of A, which reads the activation, and B."""
        if self.kind == "Conv":
            features, channels, *kernel = self.shape
            return (rank * self.group, channels, *kernel), (features, rank, *[1] * len(kernel))
        rows, columns = self.shape
        if self.kind == "left MatMul":
            return (rank, columns), (rows, rank)
        return (rows, rank), (rank, columns)

    def excess(self, rank: int) -> str:
        """The reason why an adapter of this rank is of no use here; empty if it is smaller than the weight."""
        count, whole = sum(map(math.prod, self.shapes(rank))), math.prod(self.shape)
        if count < whole:
            return ""
        kind = "it is depthwise, and " if self.kind == "Conv" and self.group > 1 and self.shape[1] == 1 else ""
        return f"{kind}an adapter of rank {rank} has {count:,} numbers and its weight only {whole:,}"

    def product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The change of W that the adapter computes, without its scale, in float64."""
        a, b = a.astype(np.float64), b.astype(np.float64)
        if self.kind == "Conv":
            rank, groups = b.shape[1], self.group
            a, b = a.reshape(groups, rank, -1), b.reshape(groups, -1, rank)
        change: np.ndarray = a @ b if self.kind in ("MatMul", "Gather") else b @ a
        return change.reshape(self.shape)


def layers(graph: ir.Graph) -> Iterator[tuple[ir.Node, AdaptableLayer | str]]:
    """Yield every layer with a stored weight, and for one that cannot have an adapter the reason."""
    for node in graph.all_nodes():
        found = layer_of(node)
        if found is not None:
            yield node, found if node.graph is graph else "it is in the body of an If, Loop or Scan"


def read_names(node: ir.Node) -> list[str]:
    """The names by which a caller can name a layer that cannot have an adapter."""
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    return [name for name in (weight.name if weight else None, node.name) if name]


def layer_of(node: ir.Node) -> AdaptableLayer | str | None:
    """The layer that a node computes, or the reason why it cannot have an adapter; `None` for other nodes."""
    if node.domain == "com.microsoft" and node.op_type in ("MatMulNBits", "MatMulBnb4"):
        return _of_bits(node)
    if is_op(node, "QLinearConv", "QLinearMatMul"):
        return "its operands and its result are integers; use a file with QuantizeLinear and DequantizeLinear"
    if is_op(node, "Conv", "ConvInteger"):
        return _of_conv(node)
    if is_op(node, "MatMul", "Gemm", "MatMulInteger"):
        return _of_product(node)
    if is_op(node, "Gather"):
        return _of_gather(node)
    other = products.layer_of(node)
    whole = None if other is None else stored_weight(other.weight)
    return None if whole is None else f"adapters of {node.op_type} are not offered"


def _of_conv(node: ir.Node) -> AdaptableLayer | str | None:
    weight, ends = stored_weight(node.inputs[1]), _ends(node)
    if weight is None:
        return None
    if isinstance(ends, str):
        return ends
    x, y, dtype = ends
    return AdaptableLayer(node, "Conv", x, y, weight, weight.shape, dtype or read_dtype(node.inputs[1]),
                 group=Call(node).int("group", 1), attributes=tuple(node.attributes.values()))  # fmt: skip


def _of_product(node: ir.Node) -> AdaptableLayer | str | None:
    right, left = stored_weight(node.inputs[1]), stored_weight(node.inputs[0])
    if (right is None) == (left is None):
        return None
    call, gemm, ends = Call(node), node.op_type == "Gemm", _ends(node)
    weight = right or left
    assert weight is not None
    if isinstance(ends, str):
        return ends
    x, y, dtype = ends
    if len(weight.shape) != 2:
        return f"its weight has {len(weight.shape)} axes, and adapters are for matrices"
    if right is None:
        if gemm or node.op_type in _INTEGER:
            return "its weight is on the left"
        assert node.inputs[1] is not None
        return AdaptableLayer(node, "left MatMul", node.inputs[1], y, weight, weight.shape, read_dtype(node.inputs[0]))
    if gemm and call.int("transA", 0):
        return "it transposes its activation (transA)"
    transposed = gemm and bool(call.int("transB", 0))
    shape = weight.shape[::-1] if transposed else weight.shape
    return AdaptableLayer(node, "MatMul", x, y, weight, shape, dtype or read_dtype(node.inputs[1]), transposed,
                 call.float("alpha", 1.0) if gemm else 1.0)  # fmt: skip


def _of_gather(node: ir.Node) -> AdaptableLayer | None:
    table, indices = stored_weight(node.inputs[0]), node.inputs[1]
    if table is None or indices is None or stored_weight(indices) is not None or len(table.shape) != 2:
        return None
    dtype = read_dtype(node.inputs[0])
    if Call(node).int("axis", 0) or not dtype.is_floating_point():
        return None
    return AdaptableLayer(node, "Gather", indices, node.outputs[0], table, table.shape, dtype)


def _of_bits(node: ir.Node) -> AdaptableLayer | str | None:
    """A product with a matrix of 2, 4 or 8 bits per number, whose shape attributes tell (ContribOperators.md)."""
    weight, call, x = stored_weight(node.inputs[1]), Call(node), node.inputs[0]
    if weight is None or x is None:
        return None
    shape = call.int("K", 0), call.int("N", 0)
    whole = replace(weight, shape=shape)
    scales = node.inputs[2]
    return AdaptableLayer(node, "MatMul", x, node.outputs[0], whole, shape, x.dtype or read_dtype(scales))


def _ends(node: ir.Node) -> tuple[ir.Value, ir.Value, ir.DataType | None] | str:
    """The float activation and the float result of a layer, and the type of an integer layer's adapter."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None:
        return "it has no activation"
    if node.op_type not in _INTEGER:
        return x, y, None
    quantize = x.producer()
    cast = next((use.node for use in y.uses() if is_op(use.node, "Cast")), None)
    scaled = None if cast is None else next((u.node for u in cast.outputs[0].uses() if is_op(u.node, "Mul")), None)
    if not is_op(quantize, "DynamicQuantizeLinear") or scaled is None or len(y.uses()) != 1:
        return "it is not between a DynamicQuantizeLinear and a Cast with a Mul"
    if quantize.inputs[0] is None or cast is None or len(cast.outputs[0].uses()) != 1:
        return "its integer result is read more than once"
    return quantize.inputs[0], scaled.outputs[0], ir.DataType(cast.attributes["to"].as_int())


# -- the adapters that the metadata list -------------------------------------------------------------------------------

_POSITIVE = Is("a number above 0", lambda value: NUMBER.test(value) and 0 < value < math.inf)
_COUNT = Is("a whole number above 0", lambda value: NATURAL.test(value) and value > 0)
_FORM = {"rank": _COUNT, "alpha": _POSITIVE, "layers": [{"weight": NAME, "a": NAME, "b": NAME}]}


@dataclass(frozen=True, slots=True)
class Entry:
    """The names of one adapter: the weight that it adapts, and its two weights."""

    weight: str
    a: str
    b: str


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One adapter in a graph.

    Attributes:
        layer: The layer that it belongs to.
        a: Its weight that reads the activation.
        b: Its other weight.
        scale: The factor of the product, `alpha / rank`.
        path: The nodes Conv, MatMul or Gather; Mul; Conv or MatMul; Add.
    """

    layer: AdaptableLayer
    a: ir.Value
    b: ir.Value
    scale: float
    path: tuple[ir.Node, ...]


def note(model: ir.Model, rank: int, alpha: float, entries: Sequence[Entry]) -> None:
    """Write the adapters into the metadata of a model, in place."""
    values = {"rank": rank, "alpha": alpha, "layers": [asdict(entry) for entry in entries]}
    model.metadata_props[ADAPTERS] = json.dumps(values)


def adapters_of(model: ir.Model) -> list[Adapter]:
    """The adapters that the metadata of a model lists, each verified in the graph; none without such metadata.

    Raises:
        ModelError: The metadata are damaged, or the graph does not have an adapter that they list.
    """
    text = model.metadata_props.get(ADAPTERS)
    if text is None:
        return []
    try:
        noted = parse_json(text, {str: object})
        check_form(noted, _FORM)
        found = {layer.y: layer for _, layer in layers(model.graph) if isinstance(layer, AdaptableLayer)}
        entries = [Entry(**entry) for entry in noted["layers"]]
        scale = noted["alpha"] / noted["rank"]
        return [_verified(model.graph, entry, found, noted["rank"], scale) for entry in entries]
    except ValueError as problem:
        raise ModelError(
            f"The model's metadata {ADAPTERS!r} do not fit the model: {problem}.",
            hint="Delete them, or add the adapters again to the original file.",
        ) from problem


def adapter_names(model: ir.Model) -> list[str]:
    """The names of the weights of all adapters of a model."""
    return [v.name or "" for adapter in adapters_of(model) for v in (adapter.a, adapter.b)]


def _verified(graph: ir.Graph, entry: Entry, found: dict[ir.Value, AdaptableLayer], rank: int, scale: float) -> Adapter:
    """Follow an adapter's path through the graph; raises ValueError if it is not there."""
    a, b = (graph.initializers.get(name) for name in (entry.a, entry.b))
    if a is None or b is None or a.const_value is None or b.const_value is None:
        raise ValueError(f"there is no stored {(entry.a if a is None else entry.b)!r}")
    path = [_reader(a)]
    for _ in range(3):
        path.append(_reader(path[-1].outputs[0]))
    down, scaled, up, total = path
    base = next((v for v in total.inputs if v is not up.outputs[0]), None)
    layer = None if base is None else found.get(base)
    if layer is None or not is_op(total, "Add"):
        raise ValueError(f"the path from {entry.a!r} does not end at a layer")
    if layer.weight.root.name != entry.weight:
        raise ValueError(f"{entry.a!r} belongs to {layer.weight.root.name!r}, not to {entry.weight!r}")
    one, two = layer.operators
    if not (is_op(down, one) and is_op(scaled, "Mul") and is_op(up, two) and layer.x in down.inputs and b in up.inputs):
        raise ValueError(f"the path from {entry.a!r} is not that of an adapter")
    if {k: v.value for k, v in down.attributes.items()} != {v.name: v.value for v in layer.attributes}:
        raise ValueError(f"{down.name!r} has another geometry than {layer.node.name!r}")
    shapes = tuple(tuple(v.const_value.shape.numpy()) for v in (a, b) if v.const_value is not None)
    if shapes != layer.shapes(rank):
        raise ValueError(f"{entry.a!r} and {entry.b!r} have the shapes {shapes}, not {layer.shapes(rank)}")
    factor = next((v.const_value for v in scaled.inputs if v is not None and v.producer() is None), None)
    if factor is None or factor.size != 1 or not np.isclose(float(factor.numpy()), scale * layer.factor, rtol=1e-2):
        raise ValueError(f"the factor of {entry.a!r} is not alpha / rank")
    return Adapter(layer, a, b, scale, tuple(path))


def _reader(value: ir.Value) -> ir.Node:
    """The only node that reads a value."""
    readers = [use.node for use in value.uses()]
    if len(readers) != 1 or value.is_graph_output():
        raise ValueError(f"{value.name!r} is read {len(readers)} times, not once")
    return readers[0]
