"""What PyTorch's newer exporter says of values and nodes, in their `metadata_props`, and what that tells of its file.

It says which initializers were parameters, what it folded from which, and of which operation, with which parameters, a node
was made. By default (`optimize=True`) it also stores equal tensors once and leaves out biases that are zero, as many are
in a network fresh from its constructor, or with copied layers: trained as it is, such a file has parameters that are tied,
or missing. The notes tell which.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.notes import INITIALIZER_KIND
from onnx_convgrad.ir.passes import GraphPass

__all__ = [
    "FOLDED",
    "Merged",
    "Missing",
    "TieCopies",
    "by_exporter",
    "left_out",
    "merged",
    "normalized_inside",
    "sources",
    "tie_copies",
]

FOLDED = "pkg.onnxscript.optimizer.folded_from"
"""Which values an initializer was computed from."""

_PLACEHOLDER = "pkg.torch.onnx.original_node_name"
_OPERATION = "pkg.torch.onnx.fx_node"
_SCOPES = "pkg.torch.onnx.name_scopes"
_RULE = "pkg.onnxscript.rewriter.rule_name"

_NORMALIZATIONS = ("BatchNormalization", "InstanceNormalization", "LayerNormalization")
_RECURRENT = ("GRU", "LSTM", "RNN")
_ORDERED = ("Conv", "ConvTranspose", "PRelu", *_RECURRENT)
"""Operators that take parameters, from the second operand on, in the order in which the operation takes them.

Of a normalization without parameters the statistics are last. An operation of several recurrent layers makes a node of each.
"""

_BIAS_FIRST = "aten.addmm.default]"
"""The operation whose first operand is the bias; of others that have one it is the third."""

_FILLER = "c_constant"
"""Stands for the ones and zeros of a normalization that takes no such parameter."""


@dataclass(frozen=True, slots=True)
class Merged:
    """A parameter or buffer for which the file has another one that was equal.

    `uses` are the operands that it should be. `name` is what the module calls it, `parameter` whether it was one.
    """

    value: ir.Value
    name: str
    parameter: bool
    uses: tuple[tuple[ir.Node, int], ...]


@dataclass(frozen=True, slots=True)
class Missing:
    """The bias of `node`, a convolution or Gemm, that the exporter left out since it was zero."""

    node: ir.Node
    name: str


def sources(value: ir.Value) -> list[str]:
    """The names in the exporter's list of what it folded into a value."""
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
        own, other = value.const_value, twin.const_value
        if twin is not value and own is not None and other is not None and np.array_equal(own.numpy(), other.numpy()):
            value.replace_all_uses_with(twin)
            del graph.initializers[name]
    return len(graph.initializers) != before


def merged(graph: ir.Graph) -> list[Merged]:
    """The parameters and buffers that the file stores under the name of another one."""
    found = []
    for value in graph.initializers.values():
        own = _own(value)
        uses = [(use.node, use.idx) for use in value.uses()] if own else []
        others: dict[str, list[tuple[ir.Node, int]]] = {}
        for node, index in uses:
            meant = _meant(node, index, own)
            if meant is not None and meant not in own:
                others.setdefault(meant, []).append((node, index))
        if sum(map(len, others.values())) < len(uses):  # else nothing is known of the one that it is named for
            for placeholder, own_uses in others.items():
                name = _dotted(placeholder, own_uses[0][0])
                found.append(Merged(value, name, placeholder.startswith("p_"), tuple(own_uses)))
    return found


def left_out(graph: ir.Graph) -> list[Missing]:
    """The biases of convolutions and linear layers that were parameters and zero."""
    found = []
    for node in graph:
        if not is_op(node, "Conv", "ConvTranspose", "Gemm") or len(node.inputs) != 2:
            continue
        if "RemoveOptionalBias" not in node.metadata_props.get(_RULE, ""):
            continue
        operation, _, operands = node.metadata_props.get(_OPERATION, "").partition("(args = (")
        place = 0 if operation.endswith(_BIAS_FIRST) else 2
        bias = re.findall(r"%(\w+)", operands)[place : place + 1]
        found += [Missing(node, _dotted(placeholder, node)) for placeholder in bias if placeholder.startswith("p_")]
    return found


def normalized_inside(graph: ir.Graph) -> list[ir.Node]:
    """The convolutions and linear layers that a BatchNormalization was folded into."""
    return [node for node in graph if "FuseBatchNorm" in node.metadata_props.get(_RULE, "")]


def by_exporter(node: ir.Node) -> bool:
    """Whether the newer exporter made the node of an operation, rather than for a name."""
    return _OPERATION in node.metadata_props


def _own(value: ir.Value) -> frozenset[str]:
    """The placeholders of what a value was, or was folded from."""
    placeholder = value.metadata_props.get(_PLACEHOLDER, "")
    if value.metadata_props.get(INITIALIZER_KIND) and placeholder:
        return frozenset([placeholder])
    names = (_flat(name) for name in sources(value) if "." in name)
    return frozenset(f"{kind}_{name}" for name in names for kind in "pb")


def _flat(name: str) -> str:
    """A dotted name as it stands in placeholders."""
    return re.sub(r"\W", "_", name).lower()


def _taken(node: ir.Node) -> list[str]:
    """The placeholders of the parameters, buffers and constants that a node's operation takes, in order."""
    return re.findall(r"%([pbc]_\w+)", node.metadata_props.get(_OPERATION, ""))


def _meant(node: ir.Node, index: int, own: frozenset[str]) -> str | None:
    """The placeholder of what an operand of a node stands for; `None` where the notes do not tell."""
    taken = _taken(node)
    if is_op(node, *_NORMALIZATIONS) and _OPERATION in node.metadata_props:
        place = index - 1
        if node.op_type == "BatchNormalization" and len(taken) == 2:
            if taken[0].startswith("p_"):  # statistics that an earlier use of the same module has updated
                taken = _of_earlier_use(node, taken)
            else:
                place -= 2
        return taken[place] if 0 <= place < len(taken) else _FILLER
    if is_op(node, *_ORDERED):
        layers = _layers(node)
        place = layers.index(node) * (len(taken) // len(layers)) + index - 1
        return taken[place] if index > 0 and place < len(taken) else None
    if not taken or own & set(taken):
        return next(iter(own & set(taken)), None)
    return max(taken, key=lambda placeholder: max(_common_end(placeholder, one) for one in own))


def _of_earlier_use(node: ir.Node, parameters: list[str]) -> list[str]:
    """What a BatchNormalization took where its module was called first: these parameters, and statistics that are stored."""
    uses = [_taken(n) for n in node.graph or () if is_op(n, "BatchNormalization")]
    return next((taken for taken in uses if len(taken) == 4 and taken[:2] == parameters), parameters)


def _layers(node: ir.Node) -> list[ir.Node]:
    """The nodes that were made of the same operation, one for each of its layers."""
    if not is_op(node, *_RECURRENT) or node.graph is None:
        return [node]
    said = node.metadata_props.get(_OPERATION)
    return [n for n in node.graph if n.op_type == node.op_type and n.metadata_props.get(_OPERATION) == said]


def _common_end(a: str, b: str) -> int:
    """How many letters two names end in alike."""
    pairs = zip(reversed(a), reversed(b), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _dotted(placeholder: str, node: ir.Node) -> str:
    """The name that a module gives to what is called `placeholder`, such as p_layer_0_weight, from where `node` stands."""
    for scope in _scopes(node):
        start = f"{_flat(scope)}_" if scope else ""
        if placeholder[2:].startswith(start):
            leaf = placeholder[2 + len(start) :]
            return f"{scope}.{leaf}" if scope else leaf
    return placeholder[2:]


def _scopes(node: ir.Node) -> Iterator[str]:
    """The modules that a node belongs to, innermost first."""
    scopes: Sequence[str] = re.findall(r"'([^']*)'", node.metadata_props.get(_SCOPES, ""))
    yield from reversed(scopes[:-1])
