"""The roles of a model's values: which are inputs, parameters, running statistics and constants, and why.

`load` computes them once and keeps them with the graph and its copies; whoever asks what a value is reads them here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import ancestors, carriers, floating, rule_of
from onnx_convgrad.autodiff.layers import layer_of
from onnx_convgrad.frontend.exporters.folded import (
    is_argument,
    is_constant_name,
    is_member_name,
    is_uniform,
    is_variable_name,
    is_written_number,
    origins,
    stands_for_parameter,
)
from onnx_convgrad.frontend.exporters.pytorch import sources
from onnx_convgrad.frontend.metadata import constants_of
from onnx_convgrad.frontend.quantizers import INTEGER_WEIGHTS, acting_nodes
from onnx_convgrad.ir.call import Call, stem
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.nodes import is_op, nested_graphs, subgraphs
from onnx_convgrad.ir.notes import (
    CONSTANTS,
    INITIALIZER_KIND,
    ROLES,
    is_bound,
    is_declared_parameter,
    is_fixed,
    mark_fixed,
    was_constant_node,
)
from onnx_convgrad.ir.passes import GraphPass

Kind = Literal["input", "parameter", "statistic", "buffer", "unclear", "constant"]


@dataclass(frozen=True, slots=True)
class Role:
    """The part of a value in its model, and the reason.

    Attributes:
        kind: `"input"`; `"parameter"`, which is trained by default; `"statistic"`, a running mean or variance; `"buffer"`,
            as the file declares it; `"unclear"`, a parameter or a constant: the file does not say; or `"constant"`.
        reason: Why it is that.
        origins: Names of the values that the exporter folded into an unclear one.
    """

    kind: Kind
    reason: str
    origins: tuple[str, ...] = ()


LAYOUT_CHANGES = frozenset(
    "Identity Transpose Reshape Squeeze Unsqueeze Cast CastLike Flatten Expand Tile Slice Split Concat".split()
)
"""Operators that may stand between a stored weight and the operand that makes it a parameter."""

_ARITHMETIC = ("elementwise", "linear")
"""Kinds of rules of operators that also compute sizes."""

_FOLDED_WEIGHT = "const_fold_opt__"
"""Beginnings of the names that tf2onnx gives to folded values: weights with moved axes, and constants."""

Passed = Mapping[ir.Value, ir.Value]
"""State of a loop body that every turn passes on unchanged -> its initial value."""


# -- the answer --------------------------------------------------------------------------------------------------------


def roles_of(graph: ir.Graph) -> Mapping[str, Role]:
    """The roles of inputs and stored values by name, as a graph or its original was loaded.

    Parameters are in the order of their first use.
    """
    found: Mapping[str, Role] = graph.meta[ROLES]
    return found


def parameters(graph: ir.Graph) -> list[ir.Value]:
    """The stored values that are trained by default, in the order of their first use."""
    return _stored(graph, "parameter")


def statistics(graph: ir.Graph) -> list[ir.Value]:
    """The stored running means and variances of BatchNormalization."""
    return _stored(graph, "statistic")


def _stored(graph: ir.Graph, kind: Kind) -> list[ir.Value]:
    found, values = roles_of(graph), graph.initializers
    return [values[name] for name, role in found.items() if role.kind == kind and name in values]


def readers(value: ir.Value) -> Iterator[ir.Node]:
    """The nodes that read a value, also through changes of layout."""
    for use in value.uses():
        yield use.node
        if use.node.op_type in LAYOUT_CHANGES:
            for result in use.node.outputs:
                yield from readers(result)


def note_constants(model: ir.Model) -> None:
    """Write into the metadata of a result which of its stored values are not parameters, for when it is loaded again.

    A graph that was written, not loaded, has no roles, and gets no such note.
    """
    found: Mapping[str, Role] | None = model.graph.meta.get(ROLES)
    if found is None:
        return
    trained = {name for name, role in found.items() if role.kind in ("parameter", "unclear")}
    stored = {n: v for g in (model.graph, *nested_graphs(model.graph)) for n, v in g.initializers.items()}
    names = [name for name, value in stored.items() if floating(value) and name not in trained]
    model.metadata_props[CONSTANTS] = json.dumps(names)


class NoteRoles(GraphPass):
    """Find the roles of the values of a canonical graph, and keep them with it and its copies."""

    def rewrite(self, model: ir.Model) -> bool:
        graph = model.graph
        for name in constants_of(model):
            if name in graph.initializers:
                mark_fixed(graph.initializers[name])
        trained = _parameters(graph)
        normalizing = [node for node in graph if is_op(node, "BatchNormalization")]
        averaged = dict.fromkeys(v for node in normalizing for v in node.inputs[3:5] if v is not None)
        unclear = _unclear(graph, trained)
        found = {v: Role("parameter", reason) for v, reason in trained.items()}
        found |= {v: Role("statistic", "running statistic") for v in averaged if v not in found and v.is_initializer()}
        reason = "parameter or constant: the file does not say which"
        found |= {v: Role("unclear", reason, tuple(names)) for v, names in unclear.items() if v not in found}
        found |= {v: Role("input", "input of the model") for v in graph.inputs if v not in found}
        found |= {v: _constant(v) for v in graph.initializers.values() if v not in found}
        graph.meta[ROLES] = {v.name or "": role for v, role in found.items()}
        return False


def _constant(value: ir.Value) -> Role:
    """The role of a stored value that is certainly no parameter and no statistic."""
    if value.metadata_props.get(INITIALIZER_KIND) == "BUFFER" and not is_bound(value):
        return Role("buffer", "buffer of the exported module")
    return Role("constant", _why_constant(value))


def _why_constant(value: ir.Value) -> str:
    if is_bound(value):
        return "input that is bound to a constant"
    if not floating(value):
        integers = any(node.op_type in INTEGER_WEIGHTS for node in readers(value))
        return "weight stored as integers" if integers else "integers"
    if was_constant_node(value) or is_fixed(value):
        return "constant of the graph"
    uses = list(value.uses())
    if not uses:
        return "not used"
    if all(use.idx == 1 and is_op(use.node, "DequantizeLinear", "QuantizeLinear") for use in uses):
        return "scale of a quantizer"
    if value.shape is not None and math.prod(d for d in value.shape if isinstance(d, int)) == 1:
        return "one number"
    return "no operand that is trained"


# -- parameters --------------------------------------------------------------------------------------------------------


def _parameters(graph: ir.Graph) -> dict[ir.Value, str]:
    """Trainable initializers, in the order of their first use, and what makes each of them one.

    If the file declares the kind of its initializers, as PyTorch's newer exporter does, the declared parameters that a
    derivative reaches are trainable and no others.

    Otherwise an initializer is trainable if it is floating and is, up to changes of layout and concatenation, an operand
    that a rule declares as a parameter. Not trainable are:

    - running statistics: no rule declares their operand as a parameter;
    - scalars that are added or multiplied, unless they are the bias of a product with a weight: they look like constants;
    - Constant nodes where other weights are initializers, such as the filter of a blur;
    - constants of the formula that an operator is written as;
    - operands of arithmetic that no derivative passes, such as the scales of a Resize;
    - the ones and zeros that an exporter gives to a normalization without scale and bias, or to a group normalization
      that is written as an instance normalization between two Reshapes, whose own scale and bias follow it.
    """
    chosen: dict[ir.Value, str] = {}
    weights: set[ir.Value] = set()
    stored = any(_trainable(v, dedicated=True) and not was_constant_node(v) for v in graph.initializers.values())
    active = acting_nodes(graph, graph.outputs)
    declared = any(is_declared_parameter(v) for v in graph.initializers.values())
    passed = _passed_states(graph)
    for node, outermost in _nodes(graph):
        rule = rule_of(node)
        if declared and rule is not None and outermost in active:
            chosen.update((v, "declared in the file") for _, v in carriers(node, rule) if is_declared_parameter(v))
        if rule is None or not rule.parameters or _normalizes_groups(node):
            continue
        if rule.kind in _ARITHMETIC and outermost not in active:
            continue
        for name, value in zip(Call(node).names[0], node.inputs, strict=False):
            if value is None or stem(name) not in rule.parameters:
                continue
            dedicated = rule.kind != "elementwise" or name == "slope" or _is_bias(node, value, passed)
            weight = dedicated and node.op_type != "Concat"
            for source in _sources(value, passed):
                constant = _is_constant(source, node, weight=weight, stored=stored, declared=declared)
                if not constant and _trainable(source, dedicated):
                    chosen.setdefault(source, f"{stem(name)} of {node.name!r} ({node.op_type})")
                    weights.update([source] if weight else [])
    if any(not was_constant_node(v) for v in weights):
        chosen = {v: why for v, why in chosen.items() if not (v in weights and was_constant_node(v))}
    return {v: why for v, why in chosen.items() if v.graph is graph}  # initializers of a body cannot be named


def _nodes(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Node]]:
    """Each node of the graph and then those in its bodies, with the node of the graph around them."""
    for outermost in graph:
        yield outermost, outermost
        for _, body in subgraphs(outermost):
            yield from ((node, outermost) for node, _ in _nodes(body))


def _passed_states(graph: ir.Graph) -> dict[ir.Value, ir.Value]:
    """States that a Loop or Scan passes on unchanged: tf2onnx writes the weights of recurrent cells like this."""
    passed: dict[ir.Value, ir.Value] = {}
    for node, _ in _nodes(graph):
        body = next((body for _, body in subgraphs(node)), None)
        if body is None or not is_op(node, "Loop", "Scan"):
            continue
        skipped = 1 if node.op_type == "Loop" else 0  # the number of the turn has no result
        for start, state, result in zip(node.inputs[skipped:], body.inputs[skipped:], body.outputs, strict=False):
            producer = result.producer()
            if start is not None and (producer.inputs[0] if is_op(producer, "Identity") else result) is state:
                passed[state] = start
    return passed


def _is_constant(value: ir.Value, node: ir.Node, *, weight: bool, stored: bool, declared: bool) -> bool:
    """Whether an operand at the place of a parameter of `node` is known to be a constant."""
    if declared and not stands_for_parameter(value):
        return True
    if node.op_type.endswith("Normalization"):
        return _is_filler(value, stored=stored)
    return stored and not weight and bool(was_constant_node(value))


def _normalizes_groups(node: ir.Node) -> bool:
    """Whether a node is an InstanceNormalization of groups of channels, with a scale of ones and a bias of zeros."""
    if not is_op(node, "InstanceNormalization"):
        return False
    x, scale, bias = node.inputs
    before, after = None if x is None else x.producer(), {use.node.op_type for use in node.outputs[0].uses()}
    if before is None or before.op_type != "Reshape" or after != {"Reshape"}:
        return False
    ones, zeros = constant_of(scale), constant_of(bias)
    return ones is not None and zeros is not None and bool((ones == 1).all()) and not zeros.any()


def _is_filler(value: ir.Value, *, stored: bool) -> bool:
    """Whether ones or zeros replace the missing parameter of a normalization.

    PyTorch's older exporter makes them Constant nodes, among weights that are `stored` as initializers; the newer one folds
    them and gives them a number as name. A parameter that still has its initial value has the name of its module.
    """
    unnamed = (stored and was_constant_node(value)) or re.fullmatch(r"val_\d+", value.name or "")
    return bool(unnamed) and is_uniform(value)


def _is_bias(node: ir.Node, value: ir.Value, passed: Passed) -> bool:
    """Whether a stored vector is added to the product with a weight of as many output channels.

    Only the case of one channel needs more than its size to be told from a constant: `[1]`, `[1, 1]` ...
    """
    other = next((v for v in node.inputs if v is not value), None)
    source = passed.get(value, value)
    if other is None or not is_op(node, "Add") or not source.is_initializer() or not source.shape:
        return False
    product = other.producer()
    while product is not None and is_op(product, "Squeeze", "Transpose", "Unsqueeze", "Reshape"):
        product = None if product.inputs[0] is None else product.inputs[0].producer()
    name = source.name or ""
    constant = is_constant_name(name) and not name.startswith(_FOLDED_WEIGHT)
    if product is None or was_constant_node(source) or constant:
        return False
    layer = layer_of(product)
    if layer is None or not _sources(layer.weight, passed):
        return False
    sizes = [d for d in source.shape if d != 1] or [1]
    return len(sizes) == 1 and sizes[0] == layer.outputs


def _sources(value: ir.Value, passed: Passed) -> list[ir.Value]:
    """The initializers that a value consists of, each once; none if it depends on anything else."""
    found, seen, todo = [], set(), [value]
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        node = value.producer()
        if value.is_initializer():
            found.append(value)
        elif value in passed:
            todo.append(passed[value])
        elif node is None or not (node.op_type in LAYOUT_CHANGES or is_op(node, "DequantizeLinear", "QuantizeLinear")):
            return []
        else:
            operands = node.inputs[: None if node.op_type == "Concat" else 1]
            if not operands or None in operands:
                return []
            todo += [v for v in reversed(operands) if v is not None]
    return found


def _trainable(value: ir.Value, dedicated: bool) -> bool:
    """Whether dtype and size fit a parameter; `dedicated` operands may have one element."""
    if not floating(value) or value.shape is None or is_bound(value) or is_fixed(value):
        return False
    many = any(isinstance(d, int) and d > 1 for d in value.shape) and 0 not in value.shape
    return is_declared_parameter(value) or many or (dedicated and 0 not in value.shape)


# -- doubts ------------------------------------------------------------------------------------------------------------


def _unclear(graph: ir.Graph, trained: Collection[ir.Value]) -> dict[ir.Value, list[str]]:
    """Values that act on the outputs and may be parameters besides the `trained`, with those that they are folded from.

    PyTorch's older exporter stores parameters and buffers under the names of members of a module, and constants under
    other names. The newer one notes the names of folded values, but not their kinds. In other files a number that is added
    or multiplied may be a gain, unless its name or the number itself is that of a constant.
    """
    declared = any(INITIALIZER_KIND in v.metadata_props for v in graph.initializers.values())
    members = any(is_member_name(v.name or "") for v in trained)
    stored = any(not was_constant_node(v) for v in trained)
    active = ancestors(graph.outputs, frozenset(graph))
    acting: dict[ir.Value, bool] = {}
    for node in graph:
        rule = rule_of(node) if node in active else None
        if rule is None:
            continue
        for name, value in carriers(node, rule):
            slot = stem(name) in rule.parameters
            if value.is_initializer() and (slot or node.op_type != "BatchNormalization"):
                acting[value] = acting.get(value, False) or slot
    lost: dict[ir.Value, list[str]] = {}
    computed = {output.name for node in graph for output in node.outputs}
    for value in [v for v in acting if v not in trained and not is_bound(v) and not is_fixed(v)]:
        several = value.const_value is None or value.const_value.size != 1
        name = value.name or ""
        quantizes = name.endswith("_scale") and f"{name.removesuffix('_scale')}_zero_point" in graph.initializers
        if (several and is_uniform(value)) or (stored and was_constant_node(value)) or quantizes or is_argument(value):
            continue
        origin = origins([n for n in sources(value) if n not in computed]) if declared else []
        named = not declared and is_variable_name(name, members=members)
        number = acting[value] and not several and not declared
        if origin or named or (number and not is_constant_name(name) and not is_written_number(value)):
            lost[value] = origin
    return lost
