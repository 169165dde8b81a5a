"""Replace the operators of `ai.onnx.preview.training`, with which a model differentiates itself, by plain ones.

Canonicalization rewrites the optimizers. A reverse walk then replaces each Gradient node.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from onnx_convgrad.autodiff.activity import floating, node_label
from onnx_convgrad.base.forms import parse_json
from onnx_convgrad.base.progress import announce
from onnx_convgrad.errors import DifferentiationError, Problem
from onnx_convgrad.frontend.bound_inputs import BindInputs, InputValues
from onnx_convgrad.frontend.canonicalize import canonicalize
from onnx_convgrad.frontend.diagnose import judged
from onnx_convgrad.frontend.files import AnyModel, cloned
from onnx_convgrad.frontend.gradient_edges import GRADIENT, TRAINING_DOMAIN, bind_gradients, label, lift_veils
from onnx_convgrad.frontend.model import Model, check_settings
from onnx_convgrad.frontend.shapes.declared import InputShapes
from onnx_convgrad.gradient_ops.nodes import Expansion, GradientResult
from onnx_convgrad.gradient_ops.training_info import load_with_algorithm
from onnx_convgrad.ir.emit import DOMAIN
from onnx_convgrad.ir.nodes import subgraphs
from onnx_convgrad.ir.notes import GRADIENTS
from onnx_convgrad.ir.serialize import whole_proto
from onnx_convgrad.pipeline.built import Built, target_of
from onnx_convgrad.pipeline.complete import complete
from onnx_convgrad.pipeline.options import Options


@dataclass(frozen=True, slots=True)
class Lowered:
    """A model without operators of `ai.onnx.preview.training`, and a report of the replacements."""

    model: ir.Model
    operators: dict[str, int]
    """Number of nodes of each operator in the given model."""
    derivatives: tuple[GradientResult, ...]

    def proto(self) -> onnx.ModelProto:
        """The model as a proto with all its weights."""
        return whole_proto(self.model)


@judged
def lower_training_operators(
    model: AnyModel, options: Options, shapes: InputShapes | None = None, values: InputValues | None = None
) -> Lowered:
    """Run all stages; arguments and errors as for `lower_gradient_ops`.

    Args:
        model: As there.
        options: The target.
        shapes: Shapes of inputs, as for `onnx_convgrad.load`, of a model that is not loaded.
        values: Values of inputs, as for `onnx_convgrad.load`, of a model that is not loaded.
    """
    announce("reading")
    check_settings(shapes, values, None)
    m = load_with_algorithm(model)
    BindInputs(values or {})(m)  # the given inputs of a loaded model are constants already
    if isinstance(model, Model):
        shapes = model.input_shapes
    graphs = [m.graph, *(f.graph for f in m.functions.values())]
    operators = Counter(n.op_type for g in graphs for n in g.all_nodes() if n.domain == TRAINING_DOMAIN)
    announce("canonicalizing")
    interface = _Interface(m)
    for graph in graphs:
        _refuse_nested(graph)
    other_values = bind_gradients(m)
    m = canonicalize(m, shapes, fold=not other_values)
    _refuse_nested(m.graph)
    built = Built(m, options, target_of(options), cloned(m))
    announce("differentiating")
    derivatives = Expansion(built.emitter()).run()
    lift_veils(m.graph)
    complete(built)
    interface.restore(m)
    _note(m, derivatives)
    return Lowered(m, dict(operators), tuple(derivatives))


class _Interface:
    """The graph inputs with default values, which callers may still feed.

    While the model is transformed, the floating ones have no default, so that their values are not folded. Integers keep
    theirs, because they may be sizes that must be known.
    """

    def __init__(self, m: ir.Model) -> None:
        self.stored = {v: v.const_value for v in m.graph.inputs if v.is_initializer()} if m.ir_version > 3 else {}
        self.inputs = list(m.graph.inputs)
        for value in self.stored:
            if floating(value):
                del m.graph.initializers[value.name or ""]
                value.const_value = None

    def restore(self, m: ir.Model) -> None:
        """Put the inputs of the transformed model in their order, with their defaults."""
        if not self.stored:
            return
        now = {**m.graph.initializers, **{v.name or "": v for v in m.graph.inputs}}
        inputs = [now.get(v.name or "", v) for v in self.inputs]
        m.graph.inputs.clear()
        m.graph.inputs.extend(inputs)
        for old, tensor in self.stored.items():
            value = now.get(old.name or "", old)
            value.const_value = tensor
            m.graph.initializers[value.name or ""] = value


def _refuse_nested(graph: ir.Graph) -> None:
    """Raise an error for Gradient nodes in the bodies of other nodes: branches and loops cannot be differentiated there."""
    problems = [
        Problem(
            node_label(node),
            f"{TRAINING_DOMAIN}::{GRADIENT}",
            1,
            f"it is in the body of a node ({' in '.join(path)}).",
            tuple(v.name or "?" for v in node.outputs[:1]),
            "Move it, and the nodes from its xs to its y, into the main graph.",
        )
        for node, path in _nested(graph, ())
        if node.op_type == GRADIENT and node.domain in (TRAINING_DOMAIN, DOMAIN)
    ]
    if problems:
        raise DifferentiationError(problems)


def _nested(graph: ir.Graph, path: tuple[str, ...]) -> Iterator[tuple[ir.Node, tuple[str, ...]]]:
    """The nodes in the bodies of nodes, each with the nodes around it, innermost first."""
    for node in graph:
        if path:
            yield node, path
        for name, body in subgraphs(node):
            yield from _nested(body, (f"{name} of {node.op_type} {label(node)}", *path))


def _note(m: ir.Model, derivatives: list[GradientResult]) -> None:
    """Record which graph output holds which derivative; of several for one tensor the first, which has the lowest order."""
    outputs = {v.name for v in m.graph.outputs}
    try:
        stored = parse_json(m.metadata_props.pop(GRADIENTS, "{}"), {str: object})
    except ValueError:  # not written by this package
        stored = {}
    gradients = {x: y for x, y in stored.items() if isinstance(y, str) and y in outputs}
    for d in derivatives:
        if d.output in outputs:
            gradients.setdefault(d.x, d.output)
    if gradients:
        m.metadata_props[GRADIENTS] = json.dumps(gradients)
