"""Resolve the arguments `wrt` and `of`: trainable parameters, inputs, names and glob patterns.

Warnings tell of parameters that an exporter computed or folded, and of quantized models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from shlex import quote

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import ancestors, carriers, floating, rule_of
from onnx_convgrad.base.names import INSPECT, as_names, is_glob, matches, select
from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import ArgumentError, first_few
from onnx_convgrad.frontend.exporters.folded import is_computed, is_member_name, origins
from onnx_convgrad.frontend.exporters.pytorch import lost_detaches, normalized_inside, sources
from onnx_convgrad.frontend.quantizers import INTEGER_WEIGHTS
from onnx_convgrad.frontend.roles import parameters, readers, roles_of, statistics
from onnx_convgrad.ir.namespace import named_values
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.notes import INITIALIZER_KIND, is_bound, is_declared_parameter, was_constant_node

GROUPS = ("parameters", "inputs", "all")
"""Words for several values, which stand alone in `wrt`."""


def floating_tensor(value: ir.Value) -> bool:
    """Whether a value can have a derivative of its own: a sequence of tensors passes derivatives on, but has none."""
    return floating(value) and (value.type is None or isinstance(value.type, ir.TensorType))


def original_names(value: ir.Value) -> list[str]:
    """The names in the module of parameters that PyTorch's newer exporter transposed and stored under a number."""
    return [name for name in sources(value) if is_member_name(name)]


def by_name(values: Iterable[ir.Value]) -> dict[str, list[ir.Value]]:
    """Name -> the values of that name, and those that were stored under it originally."""
    named = {v.name or "": [v] for v in values}
    for value in list(named.values()):
        for name in original_names(value[0]):
            named.setdefault(name, []).extend(value)
    return named


def read_by(values: Sequence[ir.Value]) -> dict[str, list[ir.Value]]:
    """Node name -> those of the stored values that it reads, also through changes of layout."""
    found: dict[str, list[ir.Value]] = {}
    for value in values:
        for node in dict.fromkeys(readers(value)):
            if node.name:
                found.setdefault(node.name, []).append(value)
    return found


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
    found = [*(v for group in groups for v in members[group]), *_values_wrt(graph, names, trained, stored=stored)]
    values = list(dict.fromkeys(found))
    message, hint = "wrt is empty.", "Use 'parameters', 'inputs', 'all' or names."
    if "parameters" in groups:
        message = "The model has no trainable parameters."
        hint = "Use wrt='inputs' (--wrt inputs) or name a value; nothing is there to train."
        foreign = sorted({f"{node.domain}.{node.op_type}" for node in graph if node.domain and rule_of(node) is None})
        if foreign:
            hint += f" Operators that are not known may have weights: {', '.join(foreign[:5])}."
        if any(node.op_type.startswith("TreeEnsemble") for node in graph):
            hint = "Decision trees are steps, which have no derivative, so gradients train nothing here."
        if any(node.op_type in INTEGER_WEIGHTS for node in graph):
            hint = (
                "Its weights are stored as integers: train them with quantization='qat' (build_training, train --qat),"
                " train adapters beside them (transforms.add_adapters), or differentiate the model from before its"
                " quantization."
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
        _warn_of_folded(graph)
        _warn_of_computed(values)
        _warn_of_unrecognized(graph, values)
    return values


def resolve_of(graph: ir.Graph, of: str | Sequence[str] | None) -> list[ir.Value]:
    """The values that `of` names; every floating output by default. A glob means results of nodes, if it matches any."""
    if of is None:
        values = [v for v in dict.fromkeys(graph.outputs) if floating_tensor(v)]
        if not values:
            raise ArgumentError("The model has no floating output.", hint="Name a floating value in of.")
        return values
    names = as_names(of, "of")
    every = {name: [v] for name, v in _named(graph, names, "of").items()}
    computed = {name: v for name, v in every.items() if v[0].producer() is not None}
    values = select(names, computed, every, what="value in of:", see=INSPECT)
    if not values:
        raise ArgumentError("of is empty.")
    return values


def _values_wrt(
    graph: ir.Graph, names: Sequence[str], trained: Sequence[ir.Value], *, stored: bool = False
) -> list[ir.Value]:
    """The values that the argument `wrt` names.

    A glob means the parameters, and the floating inputs, that it matches. If it matches none, it means other stored values,
    then results of nodes, then the parameters that nodes of matching names read, and last constants of the graph.

    Args:
        graph: A canonical graph.
        names: Names and globs.
        trained: The parameters that are trained by default.
        stored: Globs mean stored values alone.
    """
    values = _named(graph, names, "wrt")
    inputs = () if stored else graph.inputs
    leaves = by_name(v for v in (*inputs, *trained) if floating_tensor(v))
    others = {name: [v] for name, v in values.items() if name not in leaves}
    kept = {name: v for name, v in others.items() if v[0].is_initializer() and not _is_constant(v[0])}
    constants = {name: v for name, v in others.items() if v[0].is_initializer() and name not in kept}
    results = {name: v for name, v in others.items() if not v[0].is_initializer()}
    tiers = [leaves, kept, *([] if stored else [results]), read_by(trained), constants]
    unnamed = {name: v for name, v in kept.items() if name not in names}
    _warn_of_constants(graph, [name for name in names if name not in values], leaves, unnamed)

    def meant(name: str) -> list[ir.Value]:
        return (
            [values[name]] if name in values else select(name, *tiers, what="value in wrt:", see=INSPECT, words=GROUPS)
        )

    return list(dict.fromkeys(value for name in names for value in meant(name)))


def _is_constant(value: ir.Value) -> bool:
    """Whether a stored value is known to be a constant of the graph or of the caller."""
    return bool(was_constant_node(value)) or is_bound(value)


def _named(graph: ir.Graph, names: Sequence[str], argument: str) -> dict[str, ir.Value]:
    """The floating values by name; raises `ArgumentError` if another kind of value is named."""
    values = named_values(graph)
    for value in (values[name] for name in names if name in values):
        if not floating_tensor(value):
            kind = value.type
            shown = "of unknown type" if kind is None else kind.dtype.name if isinstance(kind, ir.TensorType) else kind
            raise ArgumentError(f"{argument} names {value.name!r}, which is {shown}, not a floating tensor.")
    return {name: value for name, value in values.items() if floating_tensor(value)}


def _warn_of_constants(graph: ir.Graph, patterns: Sequence[str], leaves: Iterable[str], kept: Iterable[str]) -> None:
    """Warn of stored values that a glob matches but does not mean, since they look like constants."""
    expected = {v.name for v in statistics(graph)}
    doubtful = [name for name in kept if name not in expected]
    globs = [p for p in patterns if is_glob(p) and any(matches(p, name) for name in leaves)]
    left = [repr(name) for name in doubtful if any(matches(glob, name) for glob in globs)]
    if left:
        warn(
            f"{first_few(left)} match a glob in wrt, but look like constants: they are left out. Name them to include them."
        )


# -- warnings ----------------------------------------------------------------------------------------------------------

_SHOWN = 4


def warn_of_derivatives(graph: ir.Graph, wrt: Sequence[ir.Value]) -> None:
    """Warn of ways from `wrt` that the exporter's optimizer closed, folding a parameter, or opened, removing a `detach`."""
    _warn_of_lost_detaches(graph, wrt)
    chosen = {v.name for v in wrt if is_declared_parameter(v)}
    for name, value in graph.initializers.items():
        tied = next((source for source in sources(value) if source in chosen), None) if floating(value) else None
        if tied is not None:
            warn(
                f"The exporter computed {name!r} from {tied!r}, and it is a value of its own now: the gradient of {tied!r}"
                " does not pass through it. Export with optimize=False to keep them tied."
            )


def _warn_of_lost_detaches(graph: ir.Graph, wrt: Sequence[ir.Value]) -> None:
    lost = dict(lost_detaches(graph))
    if not lost:
        return
    varied, opened = set(wrt), []
    for node in graph:
        if varied.intersection(lost.get(node, ())):
            opened.append(node.name or node.op_type)
        if any(operand in varied for _, operand in carriers(node, rule_of(node))):
            varied.update(filter(floating, node.outputs))
    if opened:
        warn(
            f"PyTorch detaches what {_listed(opened)} reads, and the exporter's optimizer removed the detach: the gradient"
            " passes there. Export with optimize=False to keep it."
        )


def warn_of_quantized(graph: ir.Graph) -> None:
    """Warn if the model quantizes at run time: its derivatives are not zero then, but of no use."""
    active = ancestors(graph.outputs, frozenset(graph))
    steps = [n for n in graph if is_op(n, "DynamicQuantizeLinear") and n in active and n.outputs[0].uses()]
    if steps:
        warn(
            f"The model is quantized as it runs: {first_few([repr(n.name or n.outputs[0].name) for n in steps])}."
            " Without straight_through, derivatives pass only through the scales of such values."
        )


def _warn_of_folded(graph: ir.Graph) -> None:
    """Warn of normalizations that the exporter folded into the layers before them."""
    folded = [node.name or node.op_type for node in normalized_inside(graph)]
    if folded:
        warn(
            f"The exporter folded BatchNormalizations into {_listed(folded)}: those keep their statistics, and their"
            " original scale and shift have no gradient. Export with optimize=False to keep them separate."
        )


def _warn_of_computed(wrt: Sequence[ir.Value]) -> None:
    """Warn of values in `wrt` that are results of arithmetic on the parameters of the network."""
    for value in [v for v in wrt if INITIALIZER_KIND not in v.metadata_props and is_computed(v)][:_SHOWN]:
        names = [name for name in sources(value) if "." in name] or origins(sources(value))
        if names and value.name not in names:
            warn(
                f"The exporter computed {value.name!r} from {_listed(names)}: the gradient is that of {value.name!r}."
                " Export with optimize=False to keep what it is computed from."
            )


def _warn_of_unrecognized(graph: ir.Graph, wrt: Sequence[ir.Value]) -> None:
    """Warn of values that may be parameters, but are not in `wrt`."""
    chosen = {value.name for value in wrt}
    found = {name: r for name, r in roles_of(graph).items() if r.kind == "unclear" and name not in chosen}
    lost = [repr(name) + (f" (of {_listed(role.origins)})" if role.origins else "") for name, role in found.items()]
    if lost:
        first = next(iter(found))
        warn(
            f"{first_few(lost)} may be parameters or constants, and the file does not say which: they are left out."
            f" Name them to differentiate by them, too: wrt=['parameters', {first!r}]"
            f" (--wrt parameters --wrt {quote(first)})."
        )


def _listed(names: Sequence[str]) -> str:
    return first_few(list(map(repr, names)), _SHOWN)
