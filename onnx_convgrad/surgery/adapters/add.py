"""Add low-rank adapters to the layers of a model, and merge them into the weights that they adapt."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.names import select_able
from onnx_convgrad.base.numbers import positive, whole
from onnx_convgrad.errors import ArgumentError, first_few
from onnx_convgrad.frontend.files import AnyModel, read
from onnx_convgrad.frontend.kinds import transformation
from onnx_convgrad.frontend.tidy import store
from onnx_convgrad.ir.namespace import Namespace
from onnx_convgrad.ir.notes import ADAPTERS
from onnx_convgrad.surgery.adapters.layers import (
    AdaptableLayer,
    Adapter,
    Entry,
    adapters_of,
    layer_of,
    layers,
    note,
    read_names,
)
from onnx_convgrad.surgery.quantization import array_of

_OVERRIDABLE = 4
"""The first version of the format in which a stored value that is an input can be fed, and others cannot."""


@transformation
def add_adapters(
    model: AnyModel,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    targets: str | Iterable[str] = "*",
    seed: int = 0,
) -> ir.Model:
    """Add low-rank adapters (LoRA, Hu et al. 2021), which `build_training` then trains alone.

    A layer with the weight W then computes with `W + (alpha / rank) B A`, as a second path beside the layer. B (for
    a Gather: A) starts as zeros, so that the model computes the same as before. The base stays as it is, byte for byte: its
    weights may be quantized, behind DequantizeLinear or a Cast, Sub and Mul that dequantize, in MatMulNBits, in MatMulBnb4
    (NF4, as in QLoRA), or in MatMulInteger and ConvInteger between DynamicQuantizeLinear and a Mul.

    | layer | A | B |
    |---|---|---|
    | Conv, weight `[M, C/g, *kernel]` | `[rank g, C/g, *kernel]`, same geometry | `[M, rank, 1, ...]` |
    | Gemm, MatMul `x W`, W `[K, N]` | `[K, rank]` | `[rank, N]` |
    | MatMul `W x`, W `[M, K]` | `[rank, K]` | `[M, rank]` |
    | Gather along axis 0, table `[V, D]` | `[V, rank]` | `[rank, D]` |

    A starts uniformly within 1 / sqrt(n), where n is the number of terms of each of its sums; for a Gather it starts as
    zeros, and B standard normal.

    These are the starts of the authors' code (loralib), and for Conv the two convolutions of PEFT.

    Args:
        model: A path, an `onnx.ModelProto`, an `onnx_ir.Model` or an `onnx_convgrad.Model`. Never changed.
        rank: Rank of the adapters: the inner size of the product B A.
        alpha: Scale of the adapters: the product is multiplied by alpha / rank.
        targets: Names and globs of weights or nodes that get adapters. Globs leave out layers whose adapter would not be
            smaller than the weight (a depthwise convolution) and layers that cannot have one; such a name in full is an
            error.
        seed: Seed of the random starts.

    Returns:
        The model. The adapter of `conv1.weight` has the initializers `conv1.lora_A` and `conv1.lora_B`, which are also
        inputs with these defaults, so that ONNX Runtime can exchange them (`add_active_adapter`). The metadata
        `onnx_convgrad.adapters` lists all of them.

    Raises:
        ArgumentError: Nothing matches `targets`, a layer named in full cannot have an adapter, or the model has adapters.
        ModelError: The model cannot be read.
    """
    rank, seed = whole(rank, "rank"), whole(seed, "seed", 0)
    positive(alpha, "alpha", zero=False)
    loaded = read(model)
    if adapters_of(loaded):
        raise ArgumentError(
            "The model has adapters already.", hint="Merge them first, with og.transforms.merge_adapters."
        )
    chosen = _chosen(loaded.graph, targets, rank)
    if loaded.ir_version < _OVERRIDABLE:
        for value in [v for v in loaded.graph.inputs if v.is_initializer()]:
            loaded.graph.inputs.remove(value)
        loaded.ir_version = _OVERRIDABLE
    generator, names = np.random.default_rng(seed), Namespace.of_values(loaded.graph)
    node_names = Namespace.of_nodes(loaded.graph)
    entries = []
    for node in chosen:
        layer = layer_of(node)  # an adapter before it changes its activation
        assert isinstance(layer, AdaptableLayer), "it was one"
        stem = _stem(layer)
        a, b = (store(loaded.graph, names.claim(f"{stem}.lora_{letter}"), array)
                for letter, array in zip("AB", _start(layer, rank, generator), strict=True))  # fmt: skip
        _add_path(loaded.graph, layer, a, b, alpha / rank, names, node_names)
        entries.append(Entry(layer.weight.root.name or "", a.name or "", b.name or ""))
    note(loaded, rank, float(alpha), entries)
    return loaded


def _chosen(graph: ir.Graph, wanted: str | Iterable[str], rank: int) -> list[ir.Node]:
    """The nodes of the layers that match `wanted` and can have an adapter."""
    found = dict(layers(graph))
    if not found:
        raise ArgumentError("The model has no layer with a stored weight that could have an adapter.")

    def obstacle(node: ir.Node) -> str:
        layer = found[node]
        return layer if isinstance(layer, str) else layer.excess(rank)

    names = {n: layer.names if isinstance(layer, AdaptableLayer) else read_names(n) for n, layer in found.items()}
    return select_able(
        wanted, names, obstacle, what="weight or node in targets:", refusal="An adapter is not possible for",
        hint="Choose other layers, or a smaller rank.",
    )  # fmt: skip


def _stem(layer: AdaptableLayer) -> str:
    """The name of a layer: that of its weight without `.weight`; of its node, if an exporter numbered the weight."""
    weight = layer.weight.root.name or ""
    numbered = "::" in weight or weight.startswith("val_")
    return (layer.node.name if numbered and layer.node.name else weight).removesuffix(".weight")


def _start(layer: AdaptableLayer, rank: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The first values of A and B."""
    shape_a, shape_b = layer.shapes(rank)
    dtype = layer.dtype.numpy()
    if layer.is_table:
        return np.zeros(shape_a, dtype), generator.standard_normal(shape_b).astype(dtype)
    fan_in = shape_a[0] if layer.kind == "MatMul" else math.prod(shape_a[1:])
    bound = 1 / math.sqrt(fan_in)  # kaiming_uniform_ with a = sqrt(5)
    return generator.uniform(-bound, bound, shape_a).astype(dtype), np.zeros(shape_b, dtype)


def _add_path(
    graph: ir.Graph,
    layer: AdaptableLayer,
    a: ir.Value,
    b: ir.Value,
    scale: float,
    names: Namespace,
    node_names: Namespace,
) -> None:
    """Add `scale` times the product with A and then B to the result of a layer, in place."""
    y, label = layer.y, layer.node.name or layer.node.outputs[0].name or layer.kind
    stem = f"{(a.name or '').removesuffix('.lora_A')}.adapter"  # so that `*.lora_*` matches the weights alone
    factor = store(graph, names.claim(f"{stem}_scale"), np.asarray(scale * layer.factor, layer.dtype.numpy()))
    graph.inputs.extend([a, b])

    def node(op_type: str, inputs: list[ir.Value], suffix: str, attributes: Iterable[ir.Attr] = ()) -> ir.Node:
        made = ir.Node("", op_type, inputs, attributes, name=node_names.claim(f"{label}/adapter_{suffix}"))
        made.outputs[0].name = names.claim(f"{stem}_{suffix}")
        return made

    kernel = [1] * (len(layer.shape) - 2)
    point = [ir.AttrInt64s("kernel_shape", kernel), ir.AttrInt64("group", layer.group)] if kernel else []
    one, two = layer.operators
    down = node(one, [layer.x, a] if layer.operand else [a, layer.x], "down", layer.attributes)
    scaled = node("Mul", [down.outputs[0], factor], "scaled")
    left = layer.kind == "left MatMul"
    up = node(two, [b, scaled.outputs[0]] if left else [scaled.outputs[0], b], "up", point)
    total = node("Add", [y, up.outputs[0]], "sum")
    result = total.outputs[0]
    result.type, result.shape = y.type, y.shape
    if y.is_graph_output():
        result.name, y.name = y.name, names.claim(f"{y.name}_base")
    y.replace_all_uses_with(result, replace_graph_outputs=True)
    total.replace_input_with(0, y)
    producer = y.producer()
    assert producer is not None, "a layer's result is the result of a node"
    graph.insert_after(producer, [down, scaled, up, total])


# -- merging -----------------------------------------------------------------------------------------------------------


@transformation
def merge_adapters(model: AnyModel) -> ir.Model:
    """Add the product of every adapter to its weight, and remove the adapters: `W + (alpha / rank) B A` in one weight.

    The result has the nodes, inputs and outputs that the model had before `add_adapters`. A weight that other nodes read
    too is copied first.

    Args:
        model: A path, an `onnx.ModelProto` or an `onnx_ir.Model` with adapters. Never changed.

    Raises:
        ArgumentError: The model has no adapters, or the weight of one is quantized and would have to be rounded.
        ModelError: The metadata of the adapters do not fit the model.
    """
    loaded = read(model)
    adapters = adapters_of(loaded)
    if not adapters:
        raise ArgumentError(
            "The model has no adapters to merge.", hint="Adapters are added with og.transforms.add_adapters."
        )
    quantized = [repr(a.layer.weight.root.name) for a in adapters if a.layer.weight.changed]
    if quantized:
        raise ArgumentError(
            f"The adapters of {first_few(quantized)} cannot be merged: these weights are quantized, and merging would round"
            " the adapters away.",
            hint="Keep them beside the weights, or merge into the file from before quantization.",
        )
    names = Namespace.of_values(loaded.graph)
    for adapter in adapters:
        _merge(loaded.graph, adapter, names)
        _remove(loaded.graph, adapter)
    del loaded.metadata_props[ADAPTERS]
    return loaded


def _merge(graph: ir.Graph, adapter: Adapter, names: Namespace) -> None:
    """Change the weight of an adapter's layer, in place."""
    layer = adapter.layer
    change = adapter.scale * layer.product(array_of(adapter.a), array_of(adapter.b))
    if layer.transposed:
        change = change.T
    root, numbers = layer.weight.root, layer.weight.tensor.numpy()
    if not layer.weight.shared and root.is_initializer() and not root.is_graph_input():
        for perm in layer.weight.perms:
            change = change.transpose(np.argsort(perm))
        root.const_value = ir.Tensor(_sum(numbers, change), dtype=layer.weight.tensor.dtype, name=root.name)
        return
    for perm in reversed(layer.weight.perms):
        numbers = numbers.transpose(perm)
    merged = store(graph, names.claim(f"{root.name}_merged"), _sum(numbers, change))
    layer.node.replace_input_with(layer.operand, merged)


def _sum(numbers: np.ndarray, change: np.ndarray) -> np.ndarray:
    """The sum, computed in float64."""
    total: np.ndarray = (numbers.astype(np.float64) + change).astype(numbers.dtype)
    return total


def _remove(graph: ir.Graph, adapter: Adapter) -> None:
    """Remove the nodes and weights of an adapter, in place."""
    y, total = adapter.layer.y, adapter.path[-1].outputs[0]
    named = total.is_graph_output()
    name, total.name = total.name, None
    total.replace_all_uses_with(y, replace_graph_outputs=True)
    if named:
        y.name = name
    stored = [v for node in adapter.path for v in node.inputs if v is not None and v.is_initializer()]
    graph.remove(adapter.path, safe=True)
    for value in dict.fromkeys(stored):
        if value.uses() or value.name is None:
            continue
        if value.is_graph_input():
            graph.inputs.remove(value)
        del graph.initializers[value.name]
