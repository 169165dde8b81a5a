"""Resolve the arguments `wrt` and `of`: trainable parameters, inputs, names and glob patterns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import floating, rule_of
from onnx_convgrad.base.names import INSPECT, as_names, is_glob, matches, select
from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import ArgumentError, first_few
from onnx_convgrad.frontend.exporters.pytorch import sources
from onnx_convgrad.frontend.parameter_warnings import warn_of_choice, warn_of_derivatives
from onnx_convgrad.frontend.roles import INTEGER_WEIGHTS, parameters, readers, statistics
from onnx_convgrad.ir.namespace import named_values
from onnx_convgrad.ir.notes import is_bound, was_constant_node

GROUPS = ("parameters", "inputs", "all")
"""Words for several values, which stand alone in `wrt`."""


def floating_tensor(value: ir.Value) -> bool:
    """Whether a value can have a derivative of its own: a sequence of tensors passes derivatives on, but has none."""
    return floating(value) and (value.type is None or isinstance(value.type, ir.TensorType))


def original_names(value: ir.Value) -> list[str]:
    """The names in the module of parameters that PyTorch's newer exporter transposed and stored under a number."""
    return [name for name in sources(value) if re.fullmatch(r"[^\W\d]\w*(\.\w+)+", name)]


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
        values, message, hint = _values_of(graph, as_names(of, "of")), "of is empty.", ""
    if not values:
        raise ArgumentError(message, hint=hint)
    return values


def _values_of(graph: ir.Graph, names: Sequence[str]) -> list[ir.Value]:
    """The values that the argument `of` names; a glob means results of nodes, if it matches any."""
    values = _named(graph, names, "of")
    computed = {name: [v] for name, v in values.items() if v.producer() is not None}
    return select(names, computed, {name: [v] for name, v in values.items()}, what="value in of:", see=INSPECT)


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
