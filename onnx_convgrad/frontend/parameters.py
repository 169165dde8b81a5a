"""Resolve the arguments `wrt` and `of`: trainable parameters, inputs, names and glob patterns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import carriers, floating, rule_of
from onnx_convgrad.base.names import as_names
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.frontend.exporters.folded import is_constant_name, is_uniform, stands_for_parameter
from onnx_convgrad.frontend.parameter_warnings import warn_of_choice, warn_of_derivatives
from onnx_convgrad.frontend.quantizers import acting_nodes
from onnx_convgrad.frontend.selection import GROUPS, LAYOUT_CHANGES, floating_tensor, values_of, values_wrt
from onnx_convgrad.ir.call import Call, stem
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.dims import known
from onnx_convgrad.ir.namespace import named_values
from onnx_convgrad.ir.nodes import is_op, subgraphs
from onnx_convgrad.ir.notes import is_bound, is_declared_parameter, was_constant_node

_ARITHMETIC = ("elementwise", "linear")
"""Kinds of rules of operators that also compute sizes."""

INTEGER_WEIGHTS = frozenset(
    "ConvInteger DequantizeLinear DynamicQuantizeMatMul MatMulInteger MatMulIntegerToFloat MatMulNBits QGemm QLinearConv "
    "QLinearConvTranspose QLinearMatMul".split()
)
"""Operators, some of ONNX Runtime's own, that take weights stored as integers."""

_FOLDED_WEIGHT = "const_fold_opt__"
"""Beginnings of the names that tf2onnx gives to folded values: weights with moved axes, and constants."""

Passed = Mapping[ir.Value, ir.Value]
"""State of a loop body that every turn passes on unchanged -> its initial value."""


# -- parameters --------------------------------------------------------------------------------------------------------


def parameters(graph: ir.Graph) -> list[ir.Value]:
    """Trainable initializers, in the order of their first use.

    If the file declares the kind of its initializers, as PyTorch's newer exporter does, the declared parameters that a
    derivative reaches are trainable and no others.

    Otherwise an initializer is trainable if it is floating and is, up to changes of layout and concatenation, an operand
    that a rule declares as a parameter. Not trainable are:

    - running statistics: no rule declares their operand as a parameter;
    - scalars that are added or multiplied, unless they are the bias of a product with a weight: they look like constants;
    - Constant nodes where other weights are initializers, such as the filter of a blur;
    - operands of arithmetic that no derivative passes, such as the scales of a Resize;
    - the ones and zeros that an exporter gives to a normalization without scale and bias, or to a group normalization
      that is written as an instance normalization between two Reshapes, whose own scale and bias follow it.
    """
    chosen: dict[ir.Value, None] = {}
    weights: set[ir.Value] = set()
    stored = any(_trainable(v, dedicated=True) and not was_constant_node(v) for v in graph.initializers.values())
    active = acting_nodes(graph, graph.outputs)
    declared = any(is_declared_parameter(v) for v in graph.initializers.values())
    passed = _passed_states(graph)
    for node, outermost in _nodes(graph):
        rule = rule_of(node)
        if declared and rule is not None and outermost in active:
            chosen.update((v, None) for _, v in carriers(node, rule) if is_declared_parameter(v))
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
                    chosen[source] = None
                    weights.update([source] if weight else [])
    if any(not was_constant_node(v) for v in weights):
        chosen = {v: None for v in chosen if not (v in weights and was_constant_node(v))}
    return [value for value in chosen if value.graph is graph]  # initializers of a body cannot be named


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
    while product is not None and (
        product.op_type in ("Squeeze", "Transpose", "Unsqueeze") or is_op(product, "Reshape")
    ):
        product = None if product.inputs[0] is None else product.inputs[0].producer()
    name = source.name or ""
    constant = is_constant_name(name) and not name.startswith(_FOLDED_WEIGHT)
    if product is None or was_constant_node(source) or constant:
        return False
    sizes = [d for d in source.shape if d != 1] or [1]
    return len(sizes) == 1 and sizes[0] == _output_channels(product, passed)


def _output_channels(product: ir.Node, passed: Passed) -> int | None:
    """The number of output channels of a product with a stored weight; `None` if `product` is something else."""
    if not is_op(product, "Conv", "ConvTranspose", "Gemm", "MatMul"):
        return None
    weight = product.inputs[1]
    if weight is None or weight.shape is None or not weight.shape or not _sources(weight, passed):
        return None
    n = Call(product)
    axis = {"Conv": 0, "ConvTranspose": 1, "MatMul": -1}.get(product.op_type, 0 if n.int("transB", 0) else 1)
    size = weight.shape[axis]
    return size * n.int("group", 1) if product.op_type == "ConvTranspose" and isinstance(size, int) else known(size)


def _sources(value: ir.Value, passed: Passed) -> list[ir.Value]:
    """The initializers that a value consists of, each once; none if it depends on anything else."""
    sources, seen, todo = [], set(), [value]
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        node = value.producer()
        if value.is_initializer():
            sources.append(value)
        elif value in passed:
            todo.append(passed[value])
        elif node is None or not (node.op_type in LAYOUT_CHANGES or is_op(node, "DequantizeLinear", "QuantizeLinear")):
            return []
        else:
            operands = node.inputs[: None if node.op_type == "Concat" else 1]
            if not operands or None in operands:
                return []
            todo += [v for v in reversed(operands) if v is not None]
    return sources


def _trainable(value: ir.Value, dedicated: bool) -> bool:
    """Whether dtype and size fit a parameter; `dedicated` operands may have one element."""
    if not floating(value) or value.shape is None or is_bound(value):
        return False
    many = any(isinstance(d, int) and d > 1 for d in value.shape) and 0 not in value.shape
    return is_declared_parameter(value) or many or (dedicated and 0 not in value.shape)


# -- arguments ---------------------------------------------------------------------------------------------------------


def resolve_wrt(graph: ir.Graph, wrt: str | Sequence[str], *, stored: bool = False) -> list[ir.Value]:
    """The values that `wrt` names; raises `ArgumentError` for unknown or non-floating ones.

    A list may hold groups and names: `["parameters", "logit_scale"]`.
    With `stored`, globs mean stored values alone: inputs and results of nodes cannot be trained.
    """
    trained, inputs = parameters(graph), [v for v in graph.inputs if floating_tensor(v)]
    members = dict(zip(GROUPS, (trained, inputs, [*inputs, *trained]), strict=True))
    names = as_names(wrt, "wrt")
    known = () if isinstance(wrt, str) else named_values(graph)
    groups = [name for name in names if name in GROUPS and name not in known]
    names = [name for name in names if name not in groups]
    found = [*(v for group in groups for v in members[group]), *values_wrt(graph, names, trained, stored=stored)]
    values = list(dict.fromkeys(found))
    message, hint = "wrt is empty.", "Use 'parameters', 'inputs', 'all' or names."
    if "parameters" in groups:
        message = "The model has no trainable parameters."
        hint = "Use wrt='inputs' (--wrt inputs) or name a value; nothing is there to train."
        foreign = sorted({f"{node.domain}.{node.op_type}" for node in graph if node.domain and rule_of(node) is None})
        if foreign:
            hint += f" Operators that are not known may have weights: {', '.join(foreign[:5])}."
        if any(node.op_type in INTEGER_WEIGHTS for node in graph):
            hint = (
                "Its weights are stored as integers: train them with quantization='qat' (build_training, train --qat),"
                " or differentiate the model from before its quantization."
            )
    elif groups:
        message, hint = "The model has no floating input.", "Name a value in wrt."
        if "all" in groups:
            message = "The model has neither floating inputs nor trainable parameters."
    if not values:
        if any(isinstance(v.type, (ir.SequenceType, ir.OptionalType)) for v in graph.inputs):
            message += " Sequences and optional values have no derivative of their own."
        raise ArgumentError(message, hint=hint)
    warn_of_derivatives(graph, values)
    if "parameters" in groups or "all" in groups:
        warn_of_choice(graph, values)
    return values


def resolve_of(graph: ir.Graph, of: str | Sequence[str] | None) -> list[ir.Value]:
    """The values that `of` names; every floating output by default."""
    if of is None:
        values = [v for v in dict.fromkeys(graph.outputs) if floating_tensor(v)]
        message, hint = "The model has no floating output.", "Name a floating value in of."
    else:
        values, message, hint = values_of(graph, as_names(of, "of")), "of is empty.", ""
    if not values:
        raise ArgumentError(message, hint=hint)
    return values
