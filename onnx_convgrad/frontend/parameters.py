"""Which values `wrt` and `of` mean: parameters, inputs, names, globs."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import ancestors, carriers, floating, rule_of
from onnx_convgrad.base.names import as_names, check_names
from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import ArgumentError, first_few
from onnx_convgrad.frontend.exporters.pytorch import FOLDED, left_out, merged, normalized_inside, sources
from onnx_convgrad.ir.call import Call, stem
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.namespace import named_values
from onnx_convgrad.ir.nodes import is_op, subgraphs
from onnx_convgrad.ir.notes import INITIALIZER_KIND, is_declared_parameter, was_constant_node

__all__ = ["parameters", "resolve_of", "resolve_wrt"]

_RESHAPING = frozenset(
    "Identity Transpose Reshape Squeeze Unsqueeze Cast CastLike Flatten Expand Tile Slice Split".split()
)
"""Between a stored weight and the slot that makes it a parameter there may be a change of layout; a Concat of such too."""

_NORMALIZATIONS = frozenset(
    {"BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization", "RMSNormalization"}
)


def parameters(graph: ir.Graph) -> list[ir.Value]:
    """Trainable initializers, in the order of their first use.

    In a file that tells parameters from buffers and constants, as PyTorch's newer exporter writes it, no others count, and
    those do wherever a derivative reaches them.

    Elsewhere an initializer is trainable when it is floating and reaches, at most through a change of layout or as one of
    several pieces, an operand that a rule declares as a parameter. Running statistics are in no such operand. Scalars that
    are added or multiplied in are left out: nothing tells a trained one from a constant, but that the file calls it a
    parameter, or that it is the bias of a product with a weight. So are Constant nodes where weights are initializers,
    such as the filter of a blur, and numbers that are joined, added or multiplied to what no derivative
    passes, such as the scales of a Resize, and the ones and zeros that an exporter gives to a normalization without
    scale and bias, or to a group normalization that is written as an instance normalization between two Reshapes:
    its own scale and bias come behind them.
    """
    found: dict[ir.Value, None] = {}
    weights: set[ir.Value] = set()
    stored = any(_trainable(v, dedicated=True) and not was_constant_node(v) for v in graph.initializers.values())
    felt = ancestors(graph.outputs, frozenset(graph))
    told = any(is_declared_parameter(v) for v in graph.initializers.values())
    kept = _kept_states(graph)
    for node, outermost in _nodes(graph):
        rule = rule_of(node)
        if told and rule is not None and outermost in felt:
            found.update((v, None) for _, v in carriers(node, rule) if is_declared_parameter(v))
        if rule is None or not rule.parameters or _normalizes_groups(node):
            continue
        if rule.kind in _PLAIN and outermost not in felt:
            continue
        for name, value in zip(Call(node).names[0], node.inputs, strict=False):
            if value is None or stem(name) not in rule.parameters:
                continue
            dedicated = rule.kind != "elementwise" or name == "slope" or _biases(node, value, kept)
            for source in _stored(value, kept):
                own = dedicated and node.op_type != "Concat"
                constant = _constant(source, node, dedicated=own, stored=stored, told=told)
                if not constant and _trainable(source, dedicated):
                    found[source] = None
                    weights.update([source] if own else [])
    if any(not was_constant_node(v) for v in weights):
        found = {v: None for v in found if not (v in weights and was_constant_node(v))}
    return [value for value in found if value.graph is graph]  # what a body stores itself cannot be named


def _nodes(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Node]]:
    """The nodes of the graph and, after it, those in the bodies of each, with the node of the graph around them."""
    for outermost in graph:
        yield outermost, outermost
        for _, body in subgraphs(outermost):
            yield from ((node, outermost) for node, _ in _nodes(body))


Kept = Mapping[ir.Value, ir.Value]


def _kept_states(graph: ir.Graph) -> dict[ir.Value, ir.Value]:
    """States that a Loop or Scan hands on as they are, as tf2onnx writes weights of cells -> what they start from."""
    found: dict[ir.Value, ir.Value] = {}
    for node, _ in _nodes(graph):
        body = next((body for _, body in subgraphs(node)), None)
        if body is None or not is_op(node, "Loop", "Scan"):
            continue
        skipped = 1 if node.op_type == "Loop" else 0  # the number of the turn has no result
        for start, state, result in zip(node.inputs[skipped:], body.inputs[skipped:], body.outputs, strict=False):
            producer = result.producer()
            handed_on = producer.inputs[0] if is_op(producer, "Identity") else result
            if start is not None and handed_on is state:
                found[state] = start
    return found


_PLAIN = ("elementwise", "linear")
"""Kinds of rules of operators that models do arithmetic with, also on sizes."""


def _constant(value: ir.Value, node: ir.Node, *, dedicated: bool, stored: bool, told: bool) -> bool:
    """Whether something tells that a value which stands where `node` has a parameter is a constant."""
    if told and not _told_trainable(value):
        return True
    if node.op_type in _NORMALIZATIONS:
        return _filler(value, stored=stored)
    return stored and not dedicated and bool(was_constant_node(value))


_MADE = re.compile(
    r"val_\d+|(arange|const|empty|eye|full|lift_fresh_copy|lifted_tensor|linspace|logspace|ones|scalar_tensor|zeros)"
    r"(_like)?(_default)?(_\d+)?|helper\.constant\.\d+|p2o\.[\w.]+"
)
"""Values that an exporter makes itself: PyTorch's, or Paddle's (the last two)."""


def _told_trainable(value: ir.Value) -> bool:
    """Whether a value was a parameter, or is folded from one, where the file says what was.

    What is folded bears the names of all values on the way: those of parameters have dots, unless they belong to the
    outermost module; then a value that something else was made for is taken for a constant. What fusing a normalization
    left of weights bears a name alone.
    """
    kind, folded = (value.metadata_props.get(key) for key in (INITIALIZER_KIND, FOLDED))
    if kind is not None:
        return kind == "PARAMETER"
    if folded is None:
        return not _MADE.fullmatch(value.name or "")
    names = sources(value)
    if any("." in name for name in names):
        return True
    made = [name for name in names if _MADE.fullmatch(name)]
    return len(made) < len(names) and all(name.startswith("val_") for name in made) and not _plain(value)


def _warn_of_lost_ties(graph: ir.Graph, wrt: Sequence[ir.Value]) -> None:
    """Say where a parameter acts through a folded value too, which does not follow it any more."""
    chosen = {v.name for v in wrt if is_declared_parameter(v)}
    for name, value in graph.initializers.items():
        tied = next((source for source in sources(value) if source in chosen), None) if floating(value) else None
        if tied is not None:
            warn(
                f"The exporter computed {name!r} from {tied!r}, and it is a value of its own now: the gradient of {tied!r}"
                " does not pass through it. Export with optimize=False to keep them tied."
            )


_LAYOUT = re.compile(
    r"(_to_copy|_unsafe_view|alias|cat|clone|contiguous|flatten|flip|getitem|movedim|numpy_t|permute|reshape|roll|select|slice"
    r"|split|squeeze|t|transpose|unbind|unsqueeze|val|view)(_\d+)?"
)
"""Names of values that hold a parameter's numbers as they are."""

_ARITHMETIC = re.compile(
    r"(abs|add|clamp|cos|cumsum|div|exp|expm1|floor|floor_divide|log|log1p|log2|log_softmax|matmul|maximum|mean|minimum|mm|mul"
    r"|neg|outer|pow|reciprocal|remainder|rsqrt|rsub|sigmoid|sign|sin|softmax|softplus|sqrt|square|stack|std|sub|sum|tanh|tril"
    r"|triu|var|where)(_\d+)?"
)
"""Names of values that something was computed into."""


def _unmade(names: Sequence[str]) -> list[str]:
    """Those of names that stand for no step of a computation, but for what it starts from."""
    return [n for n in names if not any(steps.fullmatch(n) for steps in (_MADE, _LAYOUT, _ARITHMETIC))]


def _warn_of_computed(wrt: Sequence[ir.Value]) -> None:
    """Say which values that something was computed into are taken for parameters."""
    for value in [v for v in wrt if INITIALIZER_KIND not in v.metadata_props and _computed(v)][:_SHOWN]:
        dotted = [name for name in sources(value) if "." in name]
        names = dotted or _unmade(sources(value))
        if names and value.name not in names:
            warn(
                f"The exporter computed {value.name!r} from {_listed(names)}: it is {value.name!r} that has a gradient."
                " Export with optimize=False to keep what it is computed from."
            )


def _computed(value: ir.Value) -> bool:
    """Whether a folded value holds other numbers than the parameter that it is named for."""
    if not sources(value):
        return False
    steps = {n for n in (*sources(value), value.name or "") if not _LAYOUT.fullmatch(n) and not _MADE.fullmatch(n)}
    parameters = {name for name in steps if "." in name}
    return value.name in steps or len(steps - parameters) > (0 if parameters else 1)


def _warn_of_equal_parameters(graph: ir.Graph, wrt: Sequence[ir.Value]) -> None:
    """Say which parameters the exporter stored as another one, or not at all."""
    others: dict[str, list[str]] = {}
    for found in merged(graph):
        if found.parameter and found.value in wrt:
            others.setdefault(found.value.name or "", []).append(found.name)
    if others:
        pairs = [f"{_listed(names)} as {name!r}" for name, names in others.items()]
        warn(
            f"The exporter stored {'; '.join(pairs[:_SHOWN])}{'; ...' if len(pairs) > _SHOWN else ''}, for they were equal:"
            " there is one gradient, the sum of theirs. Export with optimize=False to keep them apart."
        )
    folded = [node.name or node.op_type for node in normalized_inside(graph)]
    if folded:
        warn(
            f"The exporter folded BatchNormalizations into {_listed(folded)}: those keep their statistics, and what was"
            " their scale and shift has no gradient. Export with optimize=False to keep them apart."
        )
    biases = [missing.name for missing in left_out(graph)]
    if biases:
        warn(
            f"The exporter left out {_listed(biases)}, for they were zero: they have no gradient. Export with"
            " optimize=False to keep them."
        )


def _warn_of_left_out(graph: ir.Graph, wrt: Sequence[ir.Value]) -> None:
    """Say what acts on the outputs, may be a parameter or made of one, and is not taken for one.

    PyTorch's older exporter stores parameters and buffers under the names of members of a module, and constants otherwise.
    The newer one tells what it folded, but not into what kind.
    """
    told = any(INITIALIZER_KIND in v.metadata_props for v in graph.initializers.values())
    felt = ancestors(graph.outputs, frozenset(graph))
    acting = {
        value: None
        for node in graph
        if node in felt and (rule := rule_of(node)) is not None
        for name, value in carriers(node, rule)
        if value.is_initializer() and not (node.op_type == "BatchNormalization" and stem(name) not in rule.parameters)
    }
    lost = []
    computed = {output.name for node in graph for output in node.outputs}
    for value in [v for v in acting if v not in wrt and not _plain(v)]:
        members = _unmade([n for n in sources(value) if n not in computed])
        if members if told else _MEMBER.fullmatch(value.name or "") and not _MADE.fullmatch(value.name or ""):
            lost.append(repr(value.name) + (f" (of {_listed(members)})" if told else ""))
    if lost:
        warn(
            f"{first_few(lost)} may be parameters or constants, which the file does not tell: they are left out."
            " Name them in wrt to differentiate by them, too."
        )


_OF_INTEGERS = frozenset({"ConvInteger", "DequantizeLinear", "MatMulInteger", "QLinearConv", "QLinearMatMul"})
"""Operators that take weights stored as integers."""


def _warn_of_quantized(graph: ir.Graph) -> None:
    """Say that a model is quantized as it runs, for its derivatives are not zero then, and of no use."""
    felt = ancestors(graph.outputs, frozenset(graph))
    steps = [n for n in graph if is_op(n, "DynamicQuantizeLinear") and n in felt and n.outputs[0].uses()]
    found = [repr(n.name or n.outputs[0].name) for n in steps]
    if found:
        warn(
            f"The model is quantized as it runs: {first_few(found)}. Derivatives pass through the scales of such values"
            " alone, and weights stored as integers have none; differentiate the model from before its quantization."
        )


_MEMBER = re.compile(r"[^\W\d]\w*(\.\w+)+")

_SHOWN = 4


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:_SHOWN])) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _normalizes_groups(node: ir.Node) -> bool:
    """Whether a node is an InstanceNormalization of groups of channels, with a scale of ones and a bias of zeros."""
    if node.op_type != "InstanceNormalization" or node.domain:
        return False
    x, scale, bias = node.inputs
    before, after = None if x is None else x.producer(), {use.node.op_type for use in node.outputs[0].uses()}
    if before is None or before.op_type != "Reshape" or after != {"Reshape"}:
        return False
    ones, zeros = constant_of(scale), constant_of(bias)
    return ones is not None and zeros is not None and bool((ones == 1).all()) and not zeros.any()


def _filler(value: ir.Value, *, stored: bool) -> bool:
    """Whether ones or zeros stand where a normalization has no parameter, as PyTorch's exporters write it.

    The older one makes them Constant nodes, among weights that are `stored` as initializers; the newer one folds them, and
    numbers what it folds. A parameter that still has its first value bears the name of the module.
    """
    unnamed = (stored and was_constant_node(value)) or re.fullmatch(r"val_\d+", value.name or "")
    return bool(unnamed) and _plain(value)


def _plain(value: ir.Value) -> bool:
    """Whether a value is nothing but ones, or nothing but zeros."""
    numbers = constant_of(value)
    return numbers is not None and bool((numbers == 1).all() or (numbers == 0).all())


def _biases(node: ir.Node, value: ir.Value, kept: Kept) -> bool:
    """Whether a value, as stored in the file, is added to the product with a weight of as many columns."""
    other = next((v for v in node.inputs if v is not value), None)
    product = None if other is None else other.producer()
    source = kept.get(value, value)
    if not (is_op(node, "Add") and is_op(product, "MatMul") and source.is_initializer()) or was_constant_node(source):
        return False
    weight = product.inputs[1]
    if weight is None or weight.shape is None or source.shape is None or not _stored(weight, kept):
        return False
    return list(source.shape) == list(weight.shape)[-1:]


def _stored(value: ir.Value, kept: Kept) -> list[ir.Value]:
    """The initializers that a value consists of; none if it depends on anything else."""
    if value.is_initializer():
        return [value]
    if value in kept:
        return _stored(kept[value], kept)
    node = value.producer()
    if node is None or node.op_type not in _RESHAPING | {"Concat"}:
        return []
    pieces = [[] if v is None else _stored(v, kept) for v in node.inputs[: None if node.op_type == "Concat" else 1]]
    return [source for piece in pieces for source in piece] if all(pieces) else []


def _trainable(value: ir.Value, dedicated: bool) -> bool:
    if not floating(value) or value.shape is None:
        return False
    if is_declared_parameter(value):
        return True
    size = 1
    for d in value.shape:
        size *= d if isinstance(d, int) else 1
    return size > 1 or (dedicated and len(value.shape) > 0)


def resolve_wrt(graph: ir.Graph, wrt: str | Sequence[str]) -> list[ir.Value]:
    """The values that `wrt` names; raises `ArgumentError` for unknown or non-floating ones."""
    found = _resolved(graph, wrt)
    _warn_of_lost_ties(graph, found)
    _warn_of_quantized(graph)
    if wrt in ("parameters", "all"):
        _warn_of_equal_parameters(graph, found)
        _warn_of_computed(found)
        _warn_of_left_out(graph, found)
    return found


def _resolved(graph: ir.Graph, wrt: str | Sequence[str]) -> list[ir.Value]:
    inputs = [v for v in graph.inputs if floating(v)]
    if wrt == "parameters":
        return _some(
            parameters(graph),
            "The model has no trainable parameters.",
            "Its weights are stored as integers; differentiate the model from before its quantization."
            if any(node.op_type in _OF_INTEGERS for node in graph)
            else "Use wrt='inputs' or name a value; nothing is there to train.",
        )
    if wrt == "inputs":
        return _some(inputs, "The model has no floating input.", "Name a value in wrt.")
    if wrt == "all":
        return _some(
            list(dict.fromkeys([*inputs, *parameters(graph)])),
            "The model has neither floating inputs nor trainable parameters.",
            "Name a value in wrt.",
        )
    return _some(
        _by_name(graph, as_names(wrt, "wrt"), "wrt"), "wrt is empty.", "Use 'parameters', 'inputs', 'all' or names."
    )


def resolve_of(graph: ir.Graph, of: str | Sequence[str] | None) -> list[ir.Value]:
    """The values that `of` names; every floating output by default."""
    if of is None:
        return _some(
            [v for v in dict.fromkeys(graph.outputs) if floating(v)],
            "The model has no floating output.",
            "Name a floating value in of.",
        )
    return _some(_by_name(graph, as_names(of, "of"), "of"), "of is empty.", "")


def _some(values: list[ir.Value], message: str, hint: str) -> list[ir.Value]:
    if not values:
        raise ArgumentError(message, hint=hint)
    return values


def _by_name(graph: ir.Graph, names: Sequence[str], argument: str) -> list[ir.Value]:
    values = named_values(graph)
    found: dict[ir.Value, None] = {}
    for name in names:
        if name in values:
            if not floating(values[name]):
                dtype = values[name].dtype
                raise ArgumentError(
                    f"{argument} names {name!r}, which is {dtype.name if dtype else '?'}, not floating."
                )
            found[values[name]] = None
            continue
        matches = [v for n, v in values.items() if fnmatch.fnmatchcase(n, name) and floating(v)]
        if not matches:
            check_names([name], list(values), f"value in {argument}:")
        found.update(dict.fromkeys(matches))
    return list(found)
