"""Run a float64 model in pieces: ONNX Runtime where it has a kernel, NumPy or ONNX's reference evaluator elsewhere.

The first run goes node by node and finds which nodes the runtime accepts; afterwards neighbors that it accepts share a
session.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnx_convgrad.checking.float64_kernels import KERNELS, Unavailable
from onnx_convgrad.errors import ExecutionError
from onnx_convgrad.ir.nodes import proto_bodies
from onnx_convgrad.runtime import session

Arrays = dict[str, np.ndarray]
Piece = Callable[[Arrays], None]


class Float64Session:
    """Runs a model as an `InferenceSession` does: `run(names, feed)`."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.nodes = list(proto.graph.node)
        if any(n.op_type != "If" and any(proto_bodies(n)) for n in self.nodes):
            raise ExecutionError("A model with loops cannot be evaluated in float64.")
        self.opsets = proto.opset_import
        self.weights = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
        self.keep = {o.name for o in proto.graph.output}
        self.pieces: list[Piece] = []

    def run(self, names: Sequence[str], feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Return the outputs `names` for the inputs `feed`."""
        values: Arrays = {**self.weights, **feed}
        if not self.pieces:
            self._explore(values)
        else:
            for piece in self.pieces:
                piece(values)
        return [np.asarray(values[name]) for name in names]

    def _explore(self, values: Arrays) -> None:
        """Run node by node, then make one session of neighbors that the runtime accepts."""
        dtypes: dict[str, np.dtype[Any]] = {k: np.asarray(v).dtype for k, v in values.items()}
        kernels: list[Piece | None] = []  # `None`: the runtime, whose sessions of single nodes are discarded
        for node in self.nodes:
            alone = self._piece([node], dtypes)
            piece = alone or (_branches if node.op_type == "If" else _kernel)(node, self.opsets)
            piece(values)
            kernels.append(None if alone else piece)
            dtypes.update({o: np.asarray(values[o]).dtype for o in node.output if o})
        pairs = zip(self.nodes, kernels, strict=True)
        for in_runtime, neighbors in itertools.groupby(pairs, key=lambda pair: pair[1] is None):
            nodes, others = zip(*neighbors, strict=True)
            pieces = [self._piece(nodes, dtypes)] if in_runtime else others
            self.pieces += [piece for piece in pieces if piece is not None]

    def _piece(self, nodes: Sequence[onnx.NodeProto], dtypes: Mapping[str, np.dtype[Any]]) -> Piece | None:
        """A session of these nodes, or `None` where the runtime refuses them."""
        if len(nodes) == 1 and needs_kernels(nodes):
            return None
        made = {o for n in nodes for o in n.output if o}
        inputs = list(dict.fromkeys(i for n in nodes for i in _read(n) if i not in made))
        inside = {id(n) for n in nodes}
        later = {i for n in self.nodes if id(n) not in inside for i in _read(n)} | self.keep
        results = [o for n in nodes for o in n.output if o and (o in later or len(nodes) == 1)]
        infos = [helper.make_tensor_value_info(i, helper.np_dtype_to_tensor_dtype(dtypes[i]), None) for i in inputs]
        outputs = [helper.make_empty_tensor_value_info(o) for o in results]
        graph = helper.make_graph(list(nodes), "piece", infos, outputs)
        model = helper.make_model(graph, opset_imports=list(self.opsets), ir_version=10)
        try:
            opened = session(model, optimize=False)
        except ExecutionError:
            return None

        def piece(values: Arrays) -> None:
            values.update(zip(results, opened.run(results, {i: values[i] for i in inputs}), strict=True))

        return piece


def needs_kernels(nodes: Iterable[onnx.NodeProto]) -> bool:
    """Whether an operator of `KERNELS` is among nodes or in their bodies."""
    return any(n.op_type in KERNELS or any(needs_kernels(body.node) for body in proto_bodies(n)) for n in nodes)


def _read(node: onnx.NodeProto) -> Iterator[str]:
    """The names that a node reads, those that its bodies capture too."""
    yield from filter(None, node.input)
    for body in proto_bodies(node):
        own = {t.name for t in body.initializer} | {o for n in body.node for o in n.output}
        yield from (name for n in body.node for name in _read(n) if name not in own)
        yield from (o.name for o in body.output if o.name not in own)


def _branches(node: onnx.NodeProto, opsets: Any) -> Piece:
    """Run the branch of an If that is taken, with the values around it."""
    sessions, names = {}, {}
    for attribute in node.attribute:
        model = helper.make_model(attribute.g, opset_imports=list(opsets), ir_version=10)
        sessions[attribute.name] = Float64Session(model)
        names[attribute.name] = [o.name for o in attribute.g.output]

    def piece(values: Arrays) -> None:
        taken = "then_branch" if bool(np.all(values[node.input[0]])) else "else_branch"
        results = sessions[taken].run(names[taken], values)
        values.update((o, v) for o, v in zip(node.output, results, strict=True) if o)

    return piece


def _kernel(node: onnx.NodeProto, opsets: Any) -> Piece:
    """Run one node with NumPy, or else with ONNX's reference evaluator."""
    from onnx.reference import ReferenceEvaluator

    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}

    @functools.cache
    def reference() -> Any:
        inputs = [helper.make_empty_tensor_value_info(i) for i in dict.fromkeys(node.input) if i]
        outputs = [helper.make_empty_tensor_value_info(o) for o in node.output if o]
        graph = helper.make_graph([node], "node", inputs, outputs)
        return ReferenceEvaluator(helper.make_model(graph, opset_imports=list(opsets), ir_version=10))

    kernel = KERNELS.get(node.op_type)

    def piece(values: Arrays) -> None:
        if kernel is not None:
            with contextlib.suppress(Unavailable):
                results = kernel(attributes, *(values[i] if i else None for i in node.input))
                made = results if isinstance(results, tuple) else (results,)
                values.update((o, np.asarray(v)) for o, v in zip(node.output, made, strict=False) if o)
                return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            computed = reference().run(None, {i: values[i] for i in node.input if i})
        values.update(zip((o for o in node.output if o), computed, strict=False))

    return piece
