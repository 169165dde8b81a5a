"""Replace the operators of `ai.onnx.preview.training`, with which a model differentiates itself, by plain ones.

Canonicalization rewrites the optimizers. A reverse walk then replaces each Gradient node. ONNX stores a training step in
`ModelProto.training_info`, separately from the inference graph, and defines the step as a run of both graphs combined.
Runtimes ignore `training_info`, but can run the combined graph.
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
from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import ArgumentError, DifferentiationError, ModelError, Problem, first_few
from onnx_convgrad.frontend.bound_inputs import BindInputs, InputValues
from onnx_convgrad.frontend.canonicalize import canonicalize
from onnx_convgrad.frontend.diagnose import judged
from onnx_convgrad.frontend.files import AnyModel, check_loaded, cloned, folder_of, from_proto, read, read_proto
from onnx_convgrad.frontend.gradient_edges import GRADIENT, TRAINING_DOMAIN, bind_gradients, label, lift_veils
from onnx_convgrad.frontend.model import Model, check_settings
from onnx_convgrad.frontend.shapes.declared import InputShapes
from onnx_convgrad.gradient_ops.nodes import Expansion, GradientResult
from onnx_convgrad.ir.emit import DOMAIN
from onnx_convgrad.ir.nodes import subgraphs
from onnx_convgrad.ir.notes import ALGORITHM, GRADIENTS, UPDATES
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
    m = _load_with_algorithm(model)
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


# -- models with a training algorithm ----------------------------------------------------------------------------------


_LISTS = ("node", "initializer", "sparse_initializer", "input", "output", "value_info")


def _load_with_algorithm(model: AnyModel) -> ir.Model:
    """Load a model, combined with the algorithm of its `training_info` if it has one, as an onnx_ir model of its own.

    The tensors that the algorithm updates become graph inputs with their stored values as defaults; `UPDATES` maps each to
    the output with its next value. An initialization is left out, with a warning.

    Raises:
        ModelError: The file cannot be read or is not an ONNX model; there are several algorithms; or one updates a tensor
            that is not an initializer, or by a value that is not an output.
    """
    if isinstance(model, Model) and ALGORITHM in model.source.meta:
        raise ArgumentError(
            "The model has a training algorithm (training_info), which a loaded model does not keep.",
            hint="Give the path of the file, or the onnx.ModelProto, instead of the result of onnx_convgrad.load.",
        )
    if isinstance(model, (ir.Model, Model)):  # onnx_ir does not keep training_info
        return read(model)
    proto = model if isinstance(model, onnx.ModelProto) else read_proto(model)
    combined, updates = _combined(proto) if proto.training_info else (proto, {})
    m = from_proto(combined)
    check_loaded(m, folder_of(model))
    if updates:
        m.metadata_props[UPDATES] = json.dumps(updates)
    return m


def _combined(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, str]]:
    """The model with the training step as its graph, and the updates: stored tensor -> output with its next value."""
    if len(proto.training_info) > 1:
        raise ModelError(
            f"The model has {len(proto.training_info)} training algorithms, but only one is supported.",
            hint="Remove the others: del model.training_info[1:].",
        )
    info = proto.training_info[0]
    if info.HasField("initialization"):
        names = [repr(binding.key) for binding in info.initialization_binding]
        sets = f", which sets {first_few(names)}," if names else ""
        warn(
            f"The initialization of the model's training_info{sets} is left out: training starts from the stored values."
        )
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    del result.training_info[:]
    for name in _LISTS:
        getattr(result.graph, name).extend(getattr(info.algorithm, name))
    stored = {t.name: t for t in result.graph.initializer}
    outputs = {v.name for v in result.graph.output}
    inputs = {v.name for v in result.graph.input}
    updates = {binding.key: binding.value for binding in info.update_binding}
    for key, value in updates.items():
        wrong = f"{key!r}, which is not an initializer" if key not in stored else ""
        wrong = wrong or (f"by {value!r}, which is not an output" if value not in outputs else "")
        if wrong:
            raise ModelError(f"The training_info of the model updates {wrong}.", hint="Correct its update_binding.")
        if key not in inputs:
            result.graph.input.append(onnx.helper.make_tensor_value_info(key, stored[key].data_type, stored[key].dims))
    return result, updates
