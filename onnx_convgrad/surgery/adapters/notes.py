"""Note the adapters of a model in its metadata, and find them again: the graph must say what the metadata says."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.forms import NAME, NATURAL, NUMBER, Is, check_form, parse_json
from onnx_convgrad.errors import ModelError
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.notes import ADAPTERS
from onnx_convgrad.surgery.adapters.layers import AdaptableLayer, layers

_POSITIVE = Is("a number above 0", lambda value: NUMBER.test(value) and 0 < value < math.inf)
_COUNT = Is("a whole number above 0", lambda value: NATURAL.test(value) and value > 0)
_FORM = {"rank": _COUNT, "alpha": _POSITIVE, "layers": [{"weight": NAME, "a": NAME, "b": NAME}]}


@dataclass(frozen=True, slots=True)
class Entry:
    """The names of one adapter: the weight that it adapts, and its two weights."""

    weight: str
    a: str
    b: str


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One adapter in a graph.

    Attributes:
        layer: The layer that it belongs to.
        a: Its weight that reads the activation.
        b: Its other weight.
        scale: The factor of the product, `alpha / rank`.
        path: The nodes Conv, MatMul or Gather; Mul; Conv or MatMul; Add.
    """

    layer: AdaptableLayer
    a: ir.Value
    b: ir.Value
    scale: float
    path: tuple[ir.Node, ...]


def note(model: ir.Model, rank: int, alpha: float, entries: Sequence[Entry]) -> None:
    """Write the adapters into the metadata of a model, in place."""
    values = {"rank": rank, "alpha": alpha, "layers": [asdict(entry) for entry in entries]}
    model.metadata_props[ADAPTERS] = json.dumps(values)


def adapters_of(model: ir.Model) -> list[Adapter]:
    """The adapters that the metadata of a model lists, each verified in the graph; none without such metadata.

    Raises:
        ModelError: The metadata are damaged, or the graph does not have an adapter that they list.
    """
    text = model.metadata_props.get(ADAPTERS)
    if text is None:
        return []
    try:
        noted = parse_json(text, {str: object})
        check_form(noted, _FORM)
        found = {layer.y: layer for _, layer in layers(model.graph) if isinstance(layer, AdaptableLayer)}
        entries = [Entry(**entry) for entry in noted["layers"]]
        scale = noted["alpha"] / noted["rank"]
        return [_verified(model.graph, entry, found, noted["rank"], scale) for entry in entries]
    except ValueError as problem:
        raise ModelError(
            f"The model's metadata {ADAPTERS!r} do not fit the model: {problem}.",
            hint="Delete them, or add the adapters again to the original file.",
        ) from problem


def adapter_names(model: ir.Model) -> list[str]:
    """The names of the weights of all adapters of a model."""
    return [v.name or "" for adapter in adapters_of(model) for v in (adapter.a, adapter.b)]


def _verified(graph: ir.Graph, entry: Entry, found: dict[ir.Value, AdaptableLayer], rank: int, scale: float) -> Adapter:
    """Follow an adapter's path through the graph; raises ValueError if it is not there."""
    a, b = (graph.initializers.get(name) for name in (entry.a, entry.b))
    if a is None or b is None or a.const_value is None or b.const_value is None:
        raise ValueError(f"there is no stored {(entry.a if a is None else entry.b)!r}")
    path = [_reader(a)]
    for _ in range(3):
        path.append(_reader(path[-1].outputs[0]))
    down, scaled, up, total = path
    base = next((v for v in total.inputs if v is not up.outputs[0]), None)
    layer = None if base is None else found.get(base)
    if layer is None or not is_op(total, "Add"):
        raise ValueError(f"the path from {entry.a!r} does not end at a layer")
    if layer.weight.root.name != entry.weight:
        raise ValueError(f"{entry.a!r} belongs to {layer.weight.root.name!r}, not to {entry.weight!r}")
    one, two = (
        ("Conv", "Conv") if layer.kind == "Conv" else ("Gather" if layer.kind == "Gather" else "MatMul", "MatMul")
    )
    if not (is_op(down, one) and is_op(scaled, "Mul") and is_op(up, two) and layer.x in down.inputs and b in up.inputs):
        raise ValueError(f"the path from {entry.a!r} is not that of an adapter")
    if layer.kind == "Conv" and {k: v.value for k, v in down.attributes.items()} != {
        v.name: v.value for v in layer.attributes
    }:
        raise ValueError(f"{down.name!r} has another geometry than {layer.node.name!r}")
    shapes = tuple(tuple(v.const_value.shape.numpy()) for v in (a, b) if v.const_value is not None)
    if shapes != layer.shapes(rank):
        raise ValueError(f"{entry.a!r} and {entry.b!r} have the shapes {shapes}, not {layer.shapes(rank)}")
    factor = next((v.const_value for v in scaled.inputs if v is not None and v.producer() is None), None)
    if factor is None or factor.size != 1 or not np.isclose(float(factor.numpy()), scale * layer.factor, rtol=1e-2):
        raise ValueError(f"the factor of {entry.a!r} is not alpha / rank")
    return Adapter(layer, a, b, scale, tuple(path))


def _reader(value: ir.Value) -> ir.Node:
    """The only node that reads a value."""
    readers = [use.node for use in value.uses()]
    if len(readers) != 1 or value.is_graph_output():
        raise ValueError(f"{value.name!r} is read {len(readers)} times, not once")
    return readers[0]
