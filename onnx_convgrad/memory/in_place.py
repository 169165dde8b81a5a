"""Let the next values of parameters and optimizer state be written over the current ones.

A runtime may write an output into the memory of an input if nothing reads the input afterwards. In a training step that does
not hold by itself: the gradient of a layer's input reads the weight, and may run after the update of the weight. The update
is therefore made to wait for it: it reads one of its operands through a view that can only be made once that gradient is
known (`memory.late_views`). This holds in whatever order a runtime runs the nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir

from onnx_convgrad.autodiff.facts import is_view
from onnx_convgrad.ir.constants import is_constant
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.nodes import put_in_order, values_read
from onnx_convgrad.ir.notes import IN_PLACE
from onnx_convgrad.ir.passes import GraphPass
from onnx_convgrad.memory.late_views import late_view, late_zero
from onnx_convgrad.memory.retained_bytes import is_large

_KERNELS = {  # as measured
    True: "Cast Celu Clip Elu HardSigmoid LeakyRelu LogSoftmax Relu Selu Sigmoid Softmax Softplus Softsign Tanh "
    "ThresholdedRelu",
    False: "Add Sub Mul Div Where",
}
OVERWRITING = {op: alone for alone, operators in _KERNELS.items() for op in operators.split()}
"""Operator whose kernel may write over an operand of equal shape -> whether it does so by itself, over the first."""


class WriteInPlace(GraphPass):
    """Note for each output whether it may be written over the input that it follows; see `ir.notes.IN_PLACE`.

    Args:
        following: Output of the graph -> input of the same shape and dtype.
    """

    def __init__(self, following: Mapping[str, str]) -> None:
        super().__init__()
        self.following = following

    def rewrite(self, model: ir.Model) -> bool:
        """Note and, where needed, delay updates."""
        graph = model.graph
        pairs = _pairs(graph, self.following)
        pairs = [(output, held) for output, held in pairs if output.metadata_props.get(IN_PLACE) != held.name]
        if not pairs:
            return False
        reads, changed = _Reads(graph, [v for v, _ in pairs]), False
        e = Emitter(graph, opsets=graph.opset_imports)
        for output, held in pairs:
            late = reads.late(output, held)
            if late is None or (late and not (is_large(held) and _delayed(e, output, held, late))):
                continue  # waiting takes a few nodes
            output.metadata_props[IN_PLACE] = held.name or ""
            changed = True
        if e.emitted:
            put_in_order(graph)
        return changed


def written_safely(graph: ir.Graph, following: Mapping[str, str]) -> set[str]:
    """The inputs that no node of a graph reads after the outputs that follow them.

    For a graph that a runtime made of one that `WriteInPlace` prepared.

    Args:
        graph: The graph.
        following: Output -> input.
    """
    pairs = _pairs(graph, following)
    reads = _Reads(graph, [v for v, _ in pairs])
    return {held.name or "" for v, held in pairs if reads.late(v, held) == []}


def written_over(graph: ir.Graph) -> dict[ir.Value, ir.Value]:
    """Output -> the input in whose memory it is written."""
    inputs = {v.name: v for v in graph.inputs}
    return {v: inputs[v.metadata_props[IN_PLACE]] for v in graph.outputs if IN_PLACE in v.metadata_props}


def _pairs(graph: ir.Graph, following: Mapping[str, str]) -> list[tuple[ir.Value, ir.Value]]:
    """The outputs in `following`, and the inputs that they follow."""
    inputs = {v.name: v for v in graph.inputs}
    named = [(v, inputs.get(following[v.name or ""])) for v in graph.outputs if v.name in following]
    return [(output, held) for output, held in named if held is not None]


class _Reads:
    """The nodes that read an input, also through transposed or reshaped copies, which a runtime may merge with readers."""

    def __init__(self, graph: ir.Graph, outputs: Collection[ir.Value]) -> None:
        self._readers: dict[ir.Value, list[ir.Node]] = {}
        self._bit: dict[ir.Node, int] = {}
        self._before: dict[ir.Node, int] = {}  # node -> the bits of all nodes that it depends on
        self._ends = 0
        for place, node in enumerate(graph):
            self._bit[node] = 1 << place
        for node in graph:
            before = 0
            for value in values_read(node):
                self._readers.setdefault(value, []).append(node)
                producer = value.producer()
                if producer is not None and producer in self._bit:
                    before |= self._before[producer] | self._bit[producer]
            self._before[node] = before
        for output in outputs:
            self._ends |= self._bit.get(output.producer(), 0)  # type: ignore[arg-type]

    def late(self, output: ir.Value, held: ir.Value) -> list[ir.Node] | None:
        """The readers of `held` that the output does not depend on; `None` if it cannot be written over it."""
        writer = output.producer()
        if writer is None or writer not in self._bit or output.shape is None or output.shape != held.shape:
            return None
        readers, copies = self._all_readers(held)
        if writer in readers and not _may_overwrite(writer, copies):
            return None
        done = self._before[writer] | self._bit[writer]
        late = [node for node in readers if not self._bit[node] & done]
        return None if any(self._before[node] & self._ends for node in late) else late

    def _all_readers(self, held: ir.Value) -> tuple[dict[ir.Node, None], set[ir.Value]]:
        """The nodes that read an input or a copy of it, and these values."""
        found: dict[ir.Node, None] = {}
        waiting, copies = [held], {held}
        while waiting:
            for node in self._readers.get(waiting.pop(), ()):
                found[node] = None
                views = is_view(node) and node.inputs[0] in copies  # the shape may be computed
                if views or all(v in copies or is_constant(v) for v in values_read(node)):
                    copies.update(node.outputs)
                    waiting += node.outputs
        return found, copies


def _may_overwrite(writer: ir.Node, copies: Collection[ir.Value]) -> bool:
    """Whether the kernel of a node may write its result over the operands that are among `copies`."""
    read = [i for i, v in enumerate(writer.inputs) if v in copies]
    added = read == [2] and writer.op_type == "Gemm"  # the matrix to which the product is added
    same = all(writer.inputs[i].shape == writer.outputs[0].shape for i in read)  # type: ignore[union-attr]
    return same and not writer.domain and (added or writer.op_type in OVERWRITING)


def _delayed(e: Emitter, output: ir.Value, held: ir.Value, late: Collection[ir.Node]) -> bool:
    """Let the node that computes `output` wait for other nodes; return whether it could be done."""
    writer, results = output.producer(), [node.outputs[0] for node in late]
    floats = all(v.dtype is not None and v.dtype.is_floating_point() for v in results)
    places = [i for i, v in enumerate(writer.inputs if writer else ()) if v is not None and v is not held]
    free = next((i for i in reversed(places) if not is_constant(writer.inputs[i])), None) if writer else None
    if writer is None or free is None or not floats:
        return False
    operand = writer.inputs[free]
    assert operand is not None
    with e.rewriting(writer, "late"):
        view = late_view(e, operand, late_zero(e, results))
    if view.shape is not None:  # a runtime that knows the sizes may replace the Reshape by one that need not wait
        view.shape = ir.Shape([None] * len(view.shape))
    writer.replace_input_with(free, view)
    return True
