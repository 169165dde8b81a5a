"""Replace the operators of `ai.onnx.preview.training`, with which a model differentiates itself, by plain ones.

Canonicalization rewrites the optimizers. A reverse walk then replaces each Gradient node.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import onnx
import onnx_ir as ir

from onnx_convgrad.autodiff.activity import floating, node_label
from onnx_convgrad.base.forms import parse_json
from onnx_convgrad.errors import DifferentiationError, Problem
from onnx_convgrad.frontend.bound_inputs import bind_inputs
from onnx_convgrad.frontend.canonicalize import canonicalize
from onnx_convgrad.frontend.diagnose import judged
from onnx_convgrad.frontend.files import AnyModel, cloned
from onnx_convgrad.frontend.gradient_edges import GRADIENT, TRAINING_DOMAIN, bind_gradients, label, lift_veils
from onnx_convgrad.frontend.model import Model, check_settings, refuse_settings
from onnx_convgrad.gradient_ops.nodes import Derivative, Expansion
from onnx_convgrad.gradient_ops.training_info import load_with_algorithm
from onnx_convgrad.ir.emit import DOMAIN, Emitter
from onnx_convgrad.ir.nodes import subgraphs
from onnx_convgrad.ir.notes import GRADIENTS
from onnx_convgrad.ir.serialize import whole_proto
from onnx_convgrad.lowering.lower import Choice
from onnx_convgrad.pipeline.options import Options
from onnx_convgrad.pipeline.stages import Progress, complete, target_of


@dataclass(frozen=True, slots=True)
class Lowered:
    """A model without operators of `ai.onnx.preview.training`, and a report of the replacements."""

    model: ir.Model
    operators: dict[str, int]
    """Number of nodes of each operator in the given model."""
    derivatives: tuple[Derivative, ...]
    choices: tuple[Choice, ...]

    def proto(self) -> onnx.ModelProto:
        """The model as a proto with all its weights."""
        return whole_proto(self.model)


@judged
def lower_training_operators(
    model: AnyModel,
    options: Options,
    *,
    progress: Progress = lambda _: None,
) -> Lowered:
    """Run all stages, and call `progress` with the name of each. Arguments and errors as for `lower_gradient_ops`."""
    target = target_of(options)
    progress("reading")
    if isinstance(model, Model):
        refuse_settings(input_shapes=options.input_shapes, input_values=options.input_values, limits=options.limits)
        options = replace(options, input_shapes=model.input_shapes)
    check_settings(options.input_shapes, options.input_values, options.limits)
    m = bind_inputs(load_with_algorithm(model, options.base_dir), options.input_values)
    graphs = [m.graph, *(f.graph for f in m.functions.values())]
    operators = Counter(n.op_type for g in graphs for n in g.all_nodes() if n.domain == TRAINING_DOMAIN)
    progress("canonicalizing")
    interface = _Interface(m)
    for graph in graphs:
        _refuse_nested(graph)
    other_values = bind_gradients(m)
    m = canonicalize(m, options.input_shapes, fold=not other_values)
    _refuse_nested(m.graph)
    canonical = cloned(m)
    progress("differentiating")
    joint = options.lowering != "exact"
    derivatives = Expansion(Emitter(m.graph, opsets=m.opset_imports, target=target, joint=joint)).run()
    lift_veils(m.graph)
    choices = complete(m, canonical, options, target, progress=progress).choices
    interface.restore(m)
    _note(m, derivatives)
    return Lowered(m, dict(operators), tuple(derivatives), choices)


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


def _note(m: ir.Model, derivatives: list[Derivative]) -> None:
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
