"""Infer dtypes and shapes: by symbolic inference, then ONNX's own for the rest, and last missing ranks from their nodes."""

from __future__ import annotations

import itertools
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import onnx
import onnx_ir as ir
from onnx_shape_inference import infer_symbolic_shapes

from onnx_convgrad.frontend.shapes import shape_rules
from onnx_convgrad.frontend.usable import has_known_operands
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import forget_constants
from onnx_convgrad.ir.convolution import declared_rank
from onnx_convgrad.ir.nodes import REDUCTIONS, all_nodes, is_op, nested_graphs
from onnx_convgrad.ir.passes import GraphPass
from onnx_convgrad.ir.pooling import POOLS
from onnx_convgrad.ir.serialize import skeleton

logger = logging.getLogger(__name__)


class InferShapes(GraphPass):
    """Infer the dtype and the shape of every value as far as they can be known.

    A failure of inference is logged and never refuses a model: what was found until then stays.
    """

    def rewrite(self, model: ir.Model) -> bool:
        shape_rules.install()
        try:
            with _quiet():
                infer_symbolic_shapes(model, policy="refine", warn_on_missing=False)
        except Exception as problem:  # noqa: BLE001 - see above
            logger.info("Symbolic shape inference stopped: %s", problem)
        if any(v.dtype is None or v.shape is None for node in model.graph for v in node.outputs):
            _infer_with_onnx(model)
        for node in all_nodes(model.graph):
            if is_op(node, "Loop"):
                _forget_growing_sizes(node)
        forget_constants(model.graph)
        return True


def _forget_growing_sizes(loop: ir.Node) -> None:
    """Forget the sizes in the body of a Loop whose state begins empty and grows: inference takes those of the start."""
    body = loop.attributes["body"].as_graph()
    states = zip(body.inputs[2:], body.outputs[1:], strict=False)
    sizes = [zip(before.shape or (), after.shape or (), strict=False) for before, after in states]
    if any(before == 0 != after for pairs in sizes for before, after in pairs):
        for value in (*body.inputs, *(v for node in all_nodes(body) for v in node.outputs)):
            if value.shape is not None:
                value.shape = ir.Shape([None] * len(value.shape))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence symbolic inference, which has no switch for its messages about single nodes."""
    library = logging.getLogger("onnx_shape_inference")
    level = library.level
    library.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        library.setLevel(level)


UNKNOWN_SIZE = re.compile(r"_u\d+")
"""Names of sizes that neither inference knows."""


def _infer_with_onnx(model: ir.Model) -> None:
    """Take dtypes and shapes that only ONNX's inference knows, such as types through the bodies of an If."""
    nodes = list(all_nodes(model.graph))
    if not has_known_operands(nodes):
        return
    # ONNX may write out results of a size that is an operand in a nested graph, or in a function body.
    count = any(
        node.op_type.endswith("Window") or (node.op_type == "Range" and node.graph is not model.graph) for node in nodes
    )
    try:
        inferred = onnx.shape_inference.infer_shapes(skeleton(model), data_prop=not (count or _has_long_vectors(model)))
    except Exception as problem:  # noqa: BLE001 - as above
        logger.info("onnx.shape_inference stopped: %s", problem)
        return
    types = {info.name: info.type.tensor_type for info in (*inferred.graph.value_info, *inferred.graph.output)}
    taken = {d.value for v in all_values(model.graph) for d in v.shape or () if isinstance(d, ir.SymbolicDim)}
    # symbolic inference stops at dimensions without a name
    fresh = (name for number in itertools.count() if (name := f"_u{number}") not in taken)
    for node in model.graph:
        for value in node.outputs:
            info = types.get(value.name or "")
            if info is None:
                continue
            if value.dtype is None and info.elem_type:
                value.dtype = ir.DataType(info.elem_type)
            if value.shape is None and info.HasField("shape"):
                dims = info.shape.dim
                value.shape = ir.Shape([d.dim_value if d.HasField("dim_value") else next(fresh) for d in dims])


_LONG = 4096
"""Most elements of a vector of integers that ONNX may write out one by one."""


def _has_long_vectors(model: ir.Model) -> bool:
    """Whether a value is a long vector that ONNX would write out: of integers, as if they were sizes, or of one number."""
    return any(
        (v.dtype in (ir.DataType.INT64, ir.DataType.INT32) or is_op(v.producer(), "ConstantOfShape"))
        and v.shape is not None
        and len(v.shape) == 1
        and isinstance(size := v.shape[0], int)
        and size > _LONG
        for graph in (model.graph, *nested_graphs(model.graph))
        for v in (*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs))
    )


def all_values(graph: ir.Graph) -> Iterator[ir.Value]:
    """The inputs and results of a graph and of the graphs nested in it; not the initializers."""
    yield from graph.inputs
    for node in all_nodes(graph):
        yield from node.outputs
    for sub in nested_graphs(graph):
        yield from sub.inputs


# -- ranks -------------------------------------------------------------------------------------------------------------


class InferRanks(GraphPass):
    """Give operands and results of unknown rank the rank that their node requires: most derivatives need just a rank.

    A value that got its rank here before does not count as a change: shape inference forgets some ranks again, such as that
    of a Squeeze without axes, and would be repeated forever.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inferred: set[ir.Value] = set()

    def rewrite(self, model: ir.Model) -> bool:
        values = set()
        for node in all_nodes(model.graph):
            if node.domain or node.op_type not in _RANKS:
                continue
            count, rank_of = _RANKS[node.op_type]
            rank = rank_of(Call(node))
            if rank is None:
                continue
            for value in (*node.inputs[:count], *node.outputs):
                # a branch may read an outer value of another rank where it is not taken
                if value is not None and value.shape is None and value.graph is node.graph:
                    value.shape = ir.Shape([None] * rank)
                    values.add(value)
        changed = bool(values - self.inferred)
        self.inferred |= values
        return changed


def _windows(n: Call) -> int | None:
    """The rank of an operand whose shape is known, or 2 more than the number of spatial axes in an attribute."""
    shapes = (v.shape for v in n.node.inputs[:2] if v is not None)
    axes = declared_rank(n)
    return next((len(shape) for shape in shapes if shape is not None), None if axes is None else 2 + axes)


def _kept(n: Call) -> int | None:
    """The rank of the operand of a reduction that keeps its axes, which may be known at run time only."""
    data = n.node.inputs[0]
    return None if data is None or data.shape is None or not n.int("keepdims", 1) else len(data.shape)


def _order(n: Call) -> int | None:
    order = n.ints("perm")
    return None if order is None else len(order)


_RANKS: dict[str, tuple[int, Callable[[Call], int | None]]] = {
    **dict.fromkeys(("Conv", "ConvTranspose"), (2, _windows)),
    **dict.fromkeys(POOLS, (1, _windows)),
    **dict.fromkeys(REDUCTIONS, (1, _kept)),
    "Gemm": (2, lambda _: 2),
    "Transpose": (1, _order),
}
"""Operator -> the number of operands that have the rank of the results, and a function that computes the rank."""
