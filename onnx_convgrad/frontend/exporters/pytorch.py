"""Read the notes of PyTorch's newer exporter in the `metadata_props` of values and nodes.

They say which initializers were parameters, from which values an initializer was folded, and for which operation, with
which parameters, a node was created. By default (`optimize=True`) the exporter also stores equal tensors once and omits
biases that are zero. A network fresh from its constructor or with copied layers has many of both: training such a file
would tie parameters, or miss them. The notes identify these parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.layers import WeightLayer, layer_of
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.notes import INITIALIZER_KIND, OPERATION, is_detach
from onnx_convgrad.ir.passes import GraphPass

FOLDED = "pkg.onnxscript.optimizer.folded_from"
"""Initializer: list of the values that it was computed from."""

_PLACEHOLDER = "pkg.torch.onnx.original_node_name"
_SCOPES = "pkg.torch.onnx.name_scopes"
_RULE = "pkg.onnxscript.rewriter.rule_name"

_NORMALIZATIONS = ("BatchNormalization", "InstanceNormalization", "LayerNormalization")
_RECURRENT = ("GRU", "LSTM", "RNN")
_ORDERED = ("Conv", "ConvTranspose", "PRelu", *_RECURRENT)
"""Operators whose operands from the second on are parameters, in the order of the operation.

A normalization without parameters has its statistics last. An operation with several recurrent layers has a node for each.
"""

_BIAS_FIRST = "aten.addmm.default]"
"""The operation whose first operand is the bias; in others with a bias it is the third."""

_DETACHED = re.compile(r"%detach(_\d+)?")
"""Name of a result of `detach` in the notes."""

_FILLER = "c_constant"
"""Placeholder for the ones and zeros of a normalization without parameters."""


@dataclass(frozen=True, slots=True)
class Merged:
    """A parameter or buffer that the exporter replaced by an equal one, `value`.

    `uses` are the operands that should read it, `name` is its name in the module, and `parameter` whether it was one.
    """

    value: ir.Value
    name: str
    parameter: bool
    uses: tuple[tuple[ir.Node, int], ...]


@dataclass(frozen=True, slots=True)
class Missing:
    """The bias of a layer that the exporter omitted because it was zero."""

    layer: WeightLayer
    name: str


def sources(value: ir.Value) -> list[str]:
    """The names of the values that the exporter folded into a value."""
    return re.findall(r"'([^']+)'", value.metadata_props.get(FOLDED, ""))


class TieCopies(GraphPass):
    """Merge initializers that the exporter folded in the same way from one parameter, one copy for each of its uses."""

    def rewrite(self, model: ir.Model) -> bool:
        return tie_copies(model.graph)


def tie_copies(graph: ir.Graph) -> bool:
    """See `TieCopies`; returns whether the graph changed."""
    before = len(graph.initializers)
    first: dict[object, ir.Value] = {}
    for name, value in list(graph.initializers.items()):
        if len(sources(value)) != 1 or value.shape is None or value.is_graph_input() or value.is_graph_output():
            continue
        twin = first.setdefault((value.metadata_props[FOLDED], value.dtype, tuple(value.shape)), value)
        a, b = value.const_value, twin.const_value
        if twin is not value and a is not None and b is not None and np.array_equal(a.numpy(), b.numpy()):
            value.replace_all_uses_with(twin)
            del graph.initializers[name]
    return len(graph.initializers) != before


def merged(graph: ir.Graph) -> list[Merged]:
    """The parameters and buffers that the file stores under the name of another one."""
    entries = []
    for value in graph.initializers.values():
        names = _placeholders(value)
        uses = [(use.node, use.idx) for use in value.uses()] if names else []
        others: dict[str, list[tuple[ir.Node, int]]] = {}
        for node, index in uses:
            expected = _expected(node, index, names)
            if expected is not None and expected not in names:
                others.setdefault(expected, []).append((node, index))
        if sum(map(len, others.values())) < len(uses):  # else no use is known to belong to the value itself
            for placeholder, other_uses in others.items():
                name = _dotted(placeholder, other_uses[0][0])
                entries.append(Merged(value, name, placeholder.startswith("p_"), tuple(other_uses)))
    return entries


def left_out(graph: ir.Graph) -> list[Missing]:
    """The omitted biases of convolutions and linear layers."""
    biases = []
    for node in graph:
        layer = layer_of(node) if "RemoveOptionalBias" in node.metadata_props.get(_RULE, "") else None
        if layer is None or not layer.takes_bias or len(node.inputs) != 2:
            continue
        operation, _, operands = node.metadata_props.get(OPERATION, "").partition("(args = (")
        place = 0 if operation.endswith(_BIAS_FIRST) else 2
        names = re.findall(r"%(\w+)", operands)[place : place + 1]
        biases += [Missing(layer, _dotted(name, node)) for name in names if name.startswith("p_")]
    return biases


def normalized_inside(graph: ir.Graph) -> list[ir.Node]:
    """The convolutions and linear layers into which a BatchNormalization was folded."""
    return [node for node in graph if "FuseBatchNorm" in node.metadata_props.get(_RULE, "")]


def lost_detaches(graph: ir.Graph) -> Iterator[tuple[ir.Node, Sequence[ir.Value | None]]]:
    """The nodes that read a result of `detach` which the exporter's optimizer removed, with the operands that may be it."""
    notes = {node: node.metadata_props.get(OPERATION, "") for node in graph}
    reading = {node: note for node, note in notes.items() if "%detach" in note}
    kept = {note.partition(" ")[0] for note in reading.values()}
    kept.update(f"%{name}" for name in (*graph.initializers, *(v.name for v in graph.inputs)) if reading)
    for node, note in reading.items():
        operands = re.findall(r"%\w+", note.partition("(args = (")[2])
        lost = [i for i, name in enumerate(operands) if _DETACHED.fullmatch(name) and name not in kept]
        if lost:
            alike = len(operands) == len(node.inputs)
            yield node, [node.inputs[i] for i in lost] if alike else node.inputs


def forget_detached(graph: ir.Graph) -> None:
    """Let derivatives pass PyTorch's `detach`, in place: they are then those of the numbers that the file computes."""
    for node in filter(is_detach, graph.all_nodes()):
        del node.metadata_props[OPERATION]


def by_exporter(node: ir.Node) -> bool:
    """Whether the newer exporter created the node for an operation, rather than for a name."""
    return OPERATION in node.metadata_props


def _placeholders(value: ir.Value) -> frozenset[str]:
    """The placeholders of the parameter or buffer that a value was, or was folded from."""
    placeholder = value.metadata_props.get(_PLACEHOLDER, "")
    if value.metadata_props.get(INITIALIZER_KIND) and placeholder:
        return frozenset([placeholder])
    names = (_flat(name) for name in sources(value) if "." in name)
    return frozenset(f"{kind}_{name}" for name in names for kind in "pb")


def _flat(name: str) -> str:
    """A dotted name in the form of placeholders."""
    return re.sub(r"\W", "_", name).lower()


def _taken(node: ir.Node) -> list[str]:
    """The placeholders of the parameters, buffers and constants of a node's operation, in order."""
    return re.findall(r"%([pbc]_\w+)", node.metadata_props.get(OPERATION, ""))


def _expected(node: ir.Node, index: int, names: frozenset[str]) -> str | None:
    """The placeholder of the original operand `index` of a node; `None` if the notes do not identify it."""
    taken = _taken(node)
    if is_op(node, *_NORMALIZATIONS) and OPERATION in node.metadata_props:
        place = index - 1
        if node.op_type == "BatchNormalization" and len(taken) == 2:
            if taken[0].startswith("p_"):  # the statistics are results of an earlier use of the same module
                taken = _taken_by_first_use(node, taken)
            else:
                place -= 2
        return taken[place] if 0 <= place < len(taken) else _FILLER
    if is_op(node, *_ORDERED):
        layers = _layers(node)
        place = layers.index(node) * (len(taken) // len(layers)) + index - 1
        return taken[place] if index > 0 and place < len(taken) else None
    if not taken or names & set(taken):
        return next(iter(names & set(taken)), None)
    return max(taken, key=lambda placeholder: max(_common_end(placeholder, name) for name in names))


def _taken_by_first_use(node: ir.Node, parameters: list[str]) -> list[str]:
    """Placeholders of a BatchNormalization where its module was called first, with stored statistics."""
    uses = [_taken(n) for n in node.graph or () if is_op(n, "BatchNormalization")]
    return next((taken for taken in uses if len(taken) == 4 and taken[:2] == parameters), parameters)


def _layers(node: ir.Node) -> list[ir.Node]:
    """The nodes of one operation, one for each of its layers."""
    if not is_op(node, *_RECURRENT) or node.graph is None:
        return [node]
    operation = node.metadata_props.get(OPERATION)
    return [n for n in node.graph if n.op_type == node.op_type and n.metadata_props.get(OPERATION) == operation]


def _common_end(a: str, b: str) -> int:
    """The length of the longest common ending of two names."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(reversed(a), reversed(b), strict=False)))


def _dotted(placeholder: str, node: ir.Node) -> str:
    """The name in the module of a `placeholder` such as p_layer_0_weight, as seen from `node`."""
    modules = re.findall(r"'([^']*)'", node.metadata_props.get(_SCOPES, ""))[:-1]
    for scope in reversed(modules):  # innermost first
        start = f"{_flat(scope)}_" if scope else ""
        if placeholder[2:].startswith(start):
            leaf = placeholder[2 + len(start) :]
            return f"{scope}.{leaf}" if scope else leaf
    return placeholder[2:]
