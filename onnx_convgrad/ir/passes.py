"""The contract of every pass of this package, and a function that runs passes.

Each is an `onnx_ir` pass that changes a model in place and reports whether it did, so other people can run it in their own
`onnx_ir` pipelines. A pass accepts any graph and leaves alone what it does not recognize.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import ClassVar

import onnx
import onnx_ir as ir

from onnx_convgrad.base.boundary import unforeseen
from onnx_convgrad.base.progress import note_step
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.nodes import all_nodes, nested_graphs, reader_count, release, subgraphs
from onnx_convgrad.ir.replace import OutputPlaces, put_in_place
from onnx_convgrad.ir.targets import TargetInfo

__all__ = ["Check", "GraphPass", "NodePass", "RemoveUnused", "run_passes"]


class GraphPass(ir.passes.InPlacePass):
    """Base class: a subclass rewrites a model in place and returns whether it changed anything."""

    @abstractmethod
    def rewrite(self, model: ir.Model) -> bool:
        """Rewrite `model` in place; return whether it changed."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run `rewrite`; `onnx_ir` calls this between `requires` and `ensures`."""
        return ir.passes.PassResult(model, self.rewrite(model))


class Check(GraphPass):
    """Call a function that raises an error for a model which cannot be used, and change nothing."""

    def __init__(self, function: Callable[[ir.Model], None]) -> None:
        super().__init__()
        self.function = function

    def rewrite(self, model: ir.Model) -> bool:
        self.function(model)
        return False


class RemoveUnused(GraphPass):
    """Remove nodes, initializers and optional results that nothing uses, in nested graphs too.

    Absent operands at the end of a node go as well. onnx_ir has such a pass, but it counts what the bodies of a removed node
    read as used (see quirks.READERS_IN_BODIES), and keeps initializers of bodies.
    """

    def rewrite(self, model: ir.Model) -> bool:
        graph, changed = model.graph, False
        for scope in (graph, *(function.graph for function in model.functions.values())):
            changed |= _remove_unused(scope, scope.opset_imports.get("", 0))
        for g in (graph, *nested_graphs(graph)):
            kept = set(g.inputs) if g is graph else ()
            stored = g.initializers
            unused = [
                name for name, v in stored.items() if not reader_count(v) and not v.is_graph_output() and v not in kept
            ]
            for name in unused:
                del stored[name]
            changed |= bool(unused)
        return changed


def _remove_unused(graph: ir.Graph, version: int) -> bool:
    changed = False
    for node in reversed(graph):
        if not any(reader_count(value) or value.is_graph_output() for value in node.outputs):
            release(node)
            graph.remove(node)
            changed = True
            continue
        inputs = node.inputs
        if inputs and inputs[-1] is None:
            node.resize_inputs(max((i for i, v in enumerate(inputs, 1) if v is not None), default=0))
        if not node.domain and (optional := _optional_results(node.op_type, version)):
            _remove_results(node, optional)
        for _, body in subgraphs(node):
            changed |= _remove_unused(body, version)
    return changed


@lru_cache(maxsize=1024)
def _optional_results(op_type: str, version: int) -> tuple[int, ...]:
    """The positions of results that an operator may leave out, unless their number has a meaning."""
    try:
        schema = onnx.defs.get_schema(op_type, version)
    except (onnx.defs.SchemaError, TypeError):  # a version beyond 32 bits
        return ()
    kinds, option = [result.option for result in schema.outputs], onnx.defs.OpSchema.FormalParameterOption
    if option.Variadic in kinds or (op_type == "BatchNormalization" and "training_mode" not in schema.attributes):
        return ()
    return tuple(i for i, kind in enumerate(kinds) if kind == option.Optional)


def _remove_results(node: ir.Node, optional: Collection[int]) -> None:
    """Take unused optional results away, but for a BatchNormalization in training mode, whose first result needs them."""
    if node.op_type == "BatchNormalization":
        mode = node.attributes.get("training_mode")
        if mode is not None and (mode.is_ref() or mode.type != ir.AttributeType.INT or mode.as_int()):
            return
        node.attributes.pop("training_mode", None)
    outputs = node.outputs
    for i in optional:
        if i < len(outputs) and not reader_count(outputs[i]) and not outputs[i].is_graph_output():
            outputs[i].name = ""
    if not outputs[-1].name:
        node.resize_outputs(max((i for i, v in enumerate(outputs, 1) if v.name), default=0))


class NodePass(GraphPass):
    """Base class of passes that rewrite nodes one by one, in the order of the graph.

    Args:
        target: The execution provider that will run the model, if it matters.
        keep: Values whose numbers must not change, not even in the last digit.
    """

    operators: ClassVar[Collection[str]]
    """Operators of ai.onnx that may be rewritten."""

    label: ClassVar[str]
    """Part of the names of new nodes, see `Emitter.rewriting`."""

    bodies: ClassVar[bool] = False
    """Whether nodes in the bodies of other nodes are rewritten too."""

    def __init__(self, target: TargetInfo | None = None, keep: Collection[ir.Value] = ()) -> None:
        super().__init__()
        self.target, self.keep = target, keep

    @abstractmethod
    def rewrite_node(self, e: Emitter, node: ir.Node) -> ir.Value | bool | None:
        """Rewrite `node`; return the value that replaces its first result, or whether the node was changed in place."""

    def rewrite(self, model: ir.Model) -> bool:
        """Call `rewrite_node` for the nodes of `operators`, and remove those that are replaced at the end."""
        graph, writer, changed = model.graph, None, False
        if not self.operators:
            return False
        for g in (graph, *(nested_graphs(graph) if self.bodies else ())):
            nodes = [node for node in g if not node.domain and node.op_type in self.operators]
            if not nodes:
                continue
            writer = writer or Emitter(graph, opsets=graph.opset_imports, target=self.target)
            if g is graph:
                changed = self._rewrite(writer, nodes)
                continue
            changed = self._rewrite(writer.of_body(g), nodes) or changed
        return changed

    def _rewrite(self, e: Emitter, nodes: Sequence[ir.Node]) -> bool:
        graph, outputs, replaced, changed = e.graph, OutputPlaces(e.graph), [], False
        node = nodes[0]
        try:
            for node in nodes:
                if node.graph is not graph:  # removed together with another one
                    continue
                start = e.before(node)
                result = self.rewrite_node(e, node)
                if result is None or result is False:
                    continue
                if result is not True:
                    put_in_place(e, outputs, node.outputs[0], result, new=result.producer() in e.emitted[start:])
                    replaced.append(node)
                e.name_since(start, f"{node.name}/{self.label}")
                changed = True
        except Exception as problem:
            raise unforeseen(problem, f"node {node.name!r} ({node.op_type})") from problem
        graph.remove(replaced, safe=True)
        return changed


def run_passes(model: ir.Model, passes: Sequence[ir.passes.PassBase]) -> bool:
    """Run passes in order, and note each; return whether they changed the model.

    Passes for operators that the model does not have are left out.

    Raises:
        ConvGradError: The error of a pass, without the errors that `onnx_ir` wraps around it.
    """
    changed, present = False, frozenset[str]()
    for each in passes:
        if isinstance(each, NodePass):
            present = present or frozenset(node.op_type for node in all_nodes(model.graph) if not node.domain)
        if not isinstance(each, NodePass) or not present.isdisjoint(each.operators):
            try:
                modified = each(model).modified
            except (ir.passes.PassError, ir.passes.InvariantError) as problem:
                raise _cause(problem) from None
            if modified:
                changed, present = True, frozenset()
        note_step(type(each).__name__, each.__doc__ or "", model.graph)
    return changed


def _cause(problem: BaseException) -> BaseException:
    """The original error inside the wrappers of onnx_ir's pass manager."""
    found: BaseException = problem
    while isinstance(found, (ir.passes.PassError, ir.passes.InvariantError)) and found.__cause__ is not None:
        found = found.__cause__
    return found
