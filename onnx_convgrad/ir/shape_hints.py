"""Write the command-line options that give the shape or the value of a model's input, for hints of errors."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from onnx_convgrad.ir.dims import known
from onnx_convgrad.ir.nodes import all_nodes, ancestors, is_op, values_read


def input_shape_option(inputs: Iterable[ir.Value]) -> str:
    """Return an example of `--input-shape` for the first input whose sizes are not all known, or the first input.

    Known sizes are kept; the others are typical ones. For an unknown rank, the example is a batch of images.
    """
    fed = [value for value in inputs if value.name and not value.is_initializer()]
    open_sizes = (v for v in fed if v.shape is None or any(known(d) is None for d in v.shape))
    value = next(open_sizes, fed[0] if fed else None)
    if value is None or value.shape is None:
        return f"--input-shape {'NAME' if value is None else value.name}:1,3,224,224"
    typical = (8, 3, *[64] * len(value.shape)) if len(value.shape) > 2 else (8, 64)
    sizes = [size if (size := known(d)) is not None else usual for d, usual in zip(value.shape, typical, strict=False)]
    return f"--input-shape {value.name}:{','.join(map(str, sizes))}"


def branch_hint(graph: ir.Graph) -> str:
    """Return the advice to bind an input whose numbers decide which branch of an If runs; empty if there is none."""
    for node in all_nodes(graph):
        condition = node.inputs[0] if is_op(node, "If") else None
        if condition is None:
            continue
        read = [condition, *(v for n in ancestors(condition) for v in values_read(n))]
        fed = (v for v in read if v.is_graph_input())
        name = next((v.name for v in fed if v.dtype is not None and v.dtype.numpy().kind in "biu"), None)
        if name:
            return (
                f"{name!r} decides which branch of {node.name or node.outputs[0].name!r} runs. Bind it, so that only"
                f' that branch is left: --input-value {name}=VALUE, og.load(path, input_values={{"{name}": VALUE}}).'
            )
    return ""
