"""Warn about parameters that an exporter computed, merged or left out, and about quantized models."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import ancestors, carriers, floating, rule_of
from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import first_few
from onnx_convgrad.frontend.exporters.folded import is_computed, origins
from onnx_convgrad.frontend.exporters.pytorch import left_out, lost_detaches, merged, normalized_inside, sources
from onnx_convgrad.frontend.roles import roles_of
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.notes import INITIALIZER_KIND, is_declared_parameter

_SHOWN = 4


def warn_of_choice(graph: ir.Graph, wrt: Sequence[ir.Value]) -> None:
    """Warn if `wrt`, chosen as the parameters of the model, may differ from the parameters of the exported network."""
    _warn_of_equal_parameters(graph, wrt)
    _warn_of_computed(wrt)
    _warn_of_unrecognized(graph, wrt)


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


def _warn_of_equal_parameters(graph: ir.Graph, wrt: Sequence[ir.Value]) -> None:
    """Warn of parameters that the exporter stored as another one, or not at all."""
    others: dict[str, list[str]] = {}
    for entry in merged(graph):
        if entry.parameter and entry.value in wrt:
            others.setdefault(entry.value.name or "", []).append(entry.name)
    if others:
        pairs = [f"{_listed(names)} as {name!r}" for name, names in others.items()]
        warn(
            f"The exporter stored {'; '.join(pairs[:_SHOWN])}{'; ...' if len(pairs) > _SHOWN else ''}, for they were equal:"
            " there is one gradient, the sum of theirs. Export with optimize=False to keep them separate."
        )
    folded = [node.name or node.op_type for node in normalized_inside(graph)]
    if folded:
        warn(
            f"The exporter folded BatchNormalizations into {_listed(folded)}: those keep their statistics, and their"
            " original scale and shift have no gradient. Export with optimize=False to keep them separate."
        )
    biases = [missing.name for missing in left_out(graph)]
    if biases:
        warn(
            f"The exporter left out {_listed(biases)}, for they were zero: they have no gradient. Export with"
            " optimize=False to keep them."
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
