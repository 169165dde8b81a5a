"""Order parameters by layers, from the input of a graph to its output."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import rule_of
from onnx_convgrad.autodiff.facts import is_elementwise
from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.dims import static_dims
from onnx_convgrad.ir.nodes import captured_values

Shapes = dict[str, tuple[int, ...]]
"""Parameter -> shape."""


def layers_of(graph: ir.Graph, names: Collection[str]) -> list[Shapes]:
    """Group the named initializers by layers, in the order in which data reach them in a sorted graph.

    A layer is what has the same name up to the first number: `blocks.3`, `layer1.0`, `encoder_layer_3`, `conv2`; else what
    has the same name but for the last part: `head` of `head.weight` and `head.bias`. Names of exporters, such as
    `onnx::MatMul_12` and `val_12`, are replaced by that of the node if it has one of a module, or else belong to the layer
    before. Parameters of one node are of one layer, and vectors, such as those of a normalization, join the layer before
    them unless their name is that of a layer with a matrix or kernel. A vector has one axis, however it is stored.
    """
    shapes = {name: tuple(d or 0 for d in static_dims(graph.initializers[name]) or ()) for name in names}
    keys: dict[str, str] = {}
    for node, used in _uses(graph, shapes):
        new = [name for name in used if name not in keys]
        shapes |= {name: (math.prod(shapes[name]),) for name in new if _is_vector(node, used[name], shapes[name])}
        first = next((name for name in new if _is_matrix(shapes[name])), new[0] if new else "")
        keys |= dict.fromkeys(new, _layer_name(_module_name(node) if _ANONYMOUS.fullmatch(first) else first))
    if not any(keys.values()):  # no name says anything: every matrix begins a layer
        keys = {name: name for name in keys}
    own = {key for name, key in keys.items() if key and _is_matrix(shapes[name])}
    layers: dict[str, Shapes] = {}
    latest = ""
    for name, key in keys.items():
        latest = key if key in own or not latest else latest
        layers.setdefault(latest, {})[name] = shapes[name]
    unused = {name: shape for name, shape in shapes.items() if name not in keys}
    return [*([unused] if unused else []), *layers.values()]


_ANONYMOUS = re.compile(r"onnx::\w+|val_\d+|\d+")
"""Names that PyTorch's exporters make up."""


def _uses(graph: ir.Graph, names: Mapping[str, object]) -> list[tuple[ir.Node, dict[str, ir.Value]]]:
    """The nodes that combine data with parameters, and the value of each, which may be transposed or cast before."""
    reached = {v for v in graph.inputs if not v.is_initializer()}
    carried: dict[ir.Value, tuple[str, ...]] = {v: (name,) for name, v in graph.initializers.items() if name in names}
    uses = []
    for node in graph:
        operands = [v for v in (*node.inputs, *captured_values(node)) if v is not None]
        used = {name: v for v in operands for name in carried.get(v, ())}
        if reached.isdisjoint(operands):
            carried.update(dict.fromkeys(node.outputs, tuple(used)))
            continue
        reached.update(node.outputs)
        if used:
            uses.append((node, used))
    return uses


def _is_vector(node: ir.Node, value: ir.Value, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is a bias or a scale: it meets data entry by entry, or has fewer axes than the weight."""
    if is_elementwise(node):
        return not _is_matrix(shape)
    rule, call = rule_of(node), Call(node)
    try:
        sides = () if rule is None or rule.factors is None else rule.factors(call).operands
    except UnsupportedCase:
        sides = ()
    named = zip(call.names[0], node.inputs, sides, strict=False)
    axes = {v: set(own or ()) for name, v, own in named if v is not None and rule and name in rule.parameters}
    return value in axes and any(axes[value] < others for others in axes.values())


def _is_matrix(shape: tuple[int, ...]) -> bool:
    return sum(size != 1 for size in shape) > 1


def _module_name(node: ir.Node) -> str:
    """`features.4.block.0` of `/features/features.4/block/block.0/Conv`; empty if the name is not of this form."""
    *parts, _ = (node.name or "").strip("/").split("/")
    following = [*parts[1:], ""]
    return ".".join(part for part, after in zip(parts, following, strict=False) if not after.startswith(f"{part}."))


def _layer_name(name: str) -> str:
    parts = [part for part in re.split(r"[./]+", name) if part]
    first = next((i for i, part in enumerate(parts) if re.search(r"\d", part)), None)
    if first is None:
        return ".".join(parts[:-1]) or name
    end = first + 1
    while end < len(parts) and parts[end].isdecimal():
        end += 1
    return ".".join(parts[:end])
