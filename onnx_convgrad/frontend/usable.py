"""Refuse models and nodes that cannot be used, with the reason and the remedy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import onnx
import onnx_ir as ir

from onnx_convgrad.autodiff.layers import convolves
from onnx_convgrad.errors import ModelError
from onnx_convgrad.frontend.gradient_edges import GRADIENT, TRAINING_DOMAIN, label
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.einsum_equation import objections
from onnx_convgrad.ir.nodes import all_nodes
from onnx_convgrad.ir.shape_hints import branch_hint

_RUNTIME_LAYOUTS = frozenset({"com.microsoft.nchwc", "com.ms.internal.nhwc"})
"""Domains of ONNX Runtime's own layouts, which optimization level "all" writes."""


def refuse_unusable_model(model: ir.Model) -> None:
    """Refuse an empty model and one in a layout of ONNX Runtime.

    An empty or truncated file is a valid protobuf message without a graph. A weight that ONNX Runtime has rearranged for
    the registers of one machine cannot be restored, since the file does not say how it was rearranged.
    """
    graph = model.graph
    if not (graph.inputs or graph.outputs or len(graph)):
        raise ModelError("The model is empty: it has no node, no input and no output. The file may be cut off.")
    blocked = [node for node in all_nodes(graph) if node.domain in _RUNTIME_LAYOUTS]
    if blocked:
        first = blocked[0]
        raise ModelError(
            f"{len(blocked)} nodes are in a layout that ONNX Runtime made for one machine,"
            f" the first {first.name or first.outputs[0].name!r} ({first.domain}::{first.op_type}).",
            hint="Use the model from before this optimization, or one optimized with"
            " graph_optimization_level=ORT_ENABLE_EXTENDED at most.",
        )


def refuse_unusable_graph(graph: ir.Graph) -> None:
    """Refuse Gradient nodes, whose names of tensors are not kept up to date here, and values that nothing defines."""
    gradients = [n for n in all_nodes(graph) if (n.domain, n.op_type) == (TRAINING_DOMAIN, GRADIENT)]
    if gradients:
        raise ModelError(
            f"{len(gradients)} of the model's nodes, the first {label(gradients[0])}, are Gradient of {TRAINING_DOMAIN}.",
            hint="Apply onnx_convgrad.transforms.lower_gradient_ops to the model first, or"
            " `python -m onnx_convgrad lower MODEL`.",
        )
    defined = {*graph.inputs, *graph.initializers.values()}
    for output in graph.outputs:
        if output.producer() is None and output not in defined:
            raise ModelError(
                f"The output {output.name!r} is neither an input, nor an initializer, nor the result of a node."
            )
    for node in graph:
        for value in node.inputs:
            if value is not None and value.producer() is None and value not in defined:
                raise ModelError(
                    f"Node {node.name or node.outputs[0].name!r} ({node.op_type}) reads {value.name!r}, which is neither an"
                    " input, nor an initializer, nor the result of a node.",
                    hint="Define it; onnx.checker.check_model lists what else the model lacks.",
                )


# -- nodes -------------------------------------------------------------------------------------------------------------

_AUTO_PADS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")
_SHOWN = 5
_NUMBERS = {
    **dict.fromkeys(
        "axis batch_axis batch_dims new_axis time_axis".split(), (-1000, 1000, "and no tensor has that many axes")
    ),
    **dict.fromkeys(
        "blocksize group hidden_size kv_num_heads num_groups offset_group output_height output_width p q_num_heads"
        " size".split(),
        (1, 2**31 - 1, "and must be a size above 0"),
    ),
    **dict.fromkeys(
        "allowzero antialias ceil_mode count_include_pad exclude_outside exclusive fmod interleaved inverse is_causal"
        " keepdims largest layout linear_before_reset noop_with_empty_axes onesided periodic reverse saturate"
        " select_last_index sorted storage_order training_mode transA transB upper".split(),
        (0, 1, "and must be 0 or 1"),  # runtimes differ in the meaning of other numbers
    ),
}
"""Attribute -> the least and the greatest number that it may be, and an objection to others."""

_STORED_COUNTS = {
    "Col2Im": {1: "image_shape", 2: "block_shape"},
    "STFT": {1: "frame_step", 3: "frame_length"},
}
"""Operands that hold sizes above 0."""


def has_known_operands(nodes: Iterable[ir.Node]) -> bool:
    """Whether onnx's inference can be given the nodes: without operands of known type, some end the process."""
    fragile = (node for node in nodes if node.op_type in _NEED_TYPES)
    return all(value is not None and value.dtype is not None for node in fragile for value in node.inputs)


_NEED_TYPES = frozenset(("DictVectorizer", "EyeLike", "LabelEncoder", "RegexFullMatch", "TreeEnsemble"))


def refuse_malformed_nodes(model: ir.Model) -> None:
    """Compare nodes of ai.onnx with their schemas (operands, attributes) and convolutions with their weights.

    Raises:
        ModelError: Listing every node that does not comply, and why.
    """
    version = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 0))
    problems, places = [], []
    for node in all_nodes(model.graph):
        if node.domain:
            continue
        name = node.name or next((v.name for v in node.outputs if v.name), "unnamed")
        found = [f"{name!r} ({node.op_type}, opset {version}): {reason}" for reason in _objections(node, version)]
        problems += found
        places += [node] if found else []
    if problems:
        hint = branch_hint(model.graph) if any(node.graph is not model.graph for node in places) else ""
        says = " says if that branch runs." if hint else " will say too:"
        head = f"{len(problems)} node{'s are' if len(problems) > 1 else ' is'} not valid, as ONNX Runtime{says}"
        more = [f"and {len(problems) - _SHOWN} more."] if len(problems) > _SHOWN else []
        raise ModelError(head, hint=hint, lines=[*problems[:_SHOWN], *more])


@cache
def _schema(op_type: str, version: int) -> tuple[Any, dict[str, Any]] | None:
    """The schema of an operator, with its attributes; `None` if ONNX does not know it, as a runtime may."""
    try:
        schema = onnx.defs.get_schema(op_type, max_inclusive_version=version, domain="")
    except (onnx.defs.SchemaError, TypeError):  # a version beyond 32 bits
        return None
    return schema, dict(schema.attributes)


def _objections(node: ir.Node, version: int) -> Iterator[str]:
    found = _schema(node.op_type, version)
    if found is None:
        return
    schema, attributes = found
    for what, count, least, most in (
        ("inputs", len(node.inputs), schema.min_input, schema.max_input),
        ("outputs", len(node.outputs), schema.min_output, schema.max_output),
    ):
        if not least <= count <= most:
            allowed = f"{least}" if least == most else f"{least} or more" if most > 1000 else f"{least} to {most}"
            yield f"it has {count} {what[:-1] if count == 1 else what}, and must have {allowed}."
    yield from _wrong_attributes(node, attributes)
    if "strides" in attributes:
        yield from _windows(node)
    for at, what in _STORED_COUNTS.get(node.op_type, {}).items():
        stored = constant_of(node.inputs[at]) if at < len(node.inputs) else None
        if stored is not None and stored.size and stored.min() < 1:
            yield f"its {what} is {stored.tolist()}, and must not be below 1."
    pooled = _value(node, "pooled_shape")
    if pooled is not None and (len(pooled) != 2 or min(pooled) < 1):
        yield f"its pooled_shape is {list(pooled)}, and must be two sizes above 0."
    equation = _value(node, "equation", ir.AttributeType.STRING)
    if isinstance(equation, str):
        yield from objections(equation, node.inputs)  # onnx's shape inference never ends on some equations


def _wrong_attributes(node: ir.Node, allowed: Mapping[str, Any]) -> Iterator[str]:
    """Objections to the names, types and values of attributes."""
    for key, attribute in node.attributes.items():
        if key not in allowed:
            if not key.startswith("__"):
                yield f"it has an attribute {key!r}, which {node.op_type} does not have."
        elif attribute.type != allowed[key].type.value:
            wanted = ir.AttributeType(allowed[key].type.value).name
            yield f"its attribute {key} is of type {attribute.type.name}, and must be {wanted}."
        elif attribute.ref_attr_name is None:
            yield from _wrong_value(node, key, attribute.value)
    for key, known in allowed.items():
        if known.required and key not in node.attributes:
            yield f"its attribute {key} is missing."


def _wrong_value(node: ir.Node, key: str, value: object) -> Iterator[str]:
    """Objections to the value of an attribute; some numbers of axes and outputs end the process in onnx's inference."""
    if isinstance(value, int):
        least, most, objection = _NUMBERS.get(key, (value, value, ""))
        if not least <= value <= most:
            yield f"its {key} is {value}, {objection}."
        elif key == "batch_dims" and value < 0:
            yield f"its batch_dims is {value}, and must be at least 0."
        elif key == "num_outputs" and value != len(node.outputs):
            yield f"its num_outputs is {value}, but it has {len(node.outputs)} outputs."
    elif isinstance(value, float):
        unbounded = math.isinf(value) and node.op_type in ("Clip", "Pad")
        if not (math.isfinite(value) or unbounded or node.op_type == "Constant"):
            yield f"its attribute {key} is {value}."
    elif isinstance(value, bytes):
        yield f"its attribute {key} is not UTF-8 text."


_PER_AXIS = {
    "kernel_shape": (1, 1),
    "strides": (1, 1),
    "dilations": (1, 1),
    "pads": (2, 0),
    "output_padding": (1, 0),
    "output_shape": (0, 0),
}
"""Attribute -> its count of numbers for each axis of the windows (0: any count), and the least allowed number."""


def _windows(node: ir.Node) -> Iterator[str]:
    """Objections to attributes of convolutions and pools whose values the schema does not restrict."""
    padding = _value(node, "auto_pad", ir.AttributeType.STRING) or "NOTSET"
    if padding not in _AUTO_PADS:
        yield f"its auto_pad is {padding!r}, and must be one of {', '.join(_AUTO_PADS)}."
    weight = next((v for name, v in zip(Call(node).names[0], node.inputs, strict=False) if name in ("W", "w")), None)
    sizes = None if weight is None or weight.shape is None else list(weight.shape)[2:]
    kernel = _value(node, "kernel_shape")
    if sizes is not None and kernel is not None:
        pairs = zip(kernel, sizes, strict=False)
        if len(kernel) != len(sizes) or any(isinstance(b, int) and a != b for a, b in pairs):
            yield f"its kernel_shape is {list(kernel)}, but its weight has the kernel {'x'.join(map(str, sizes))}."
            return
    if kernel is not None and not kernel:
        yield "its kernel_shape is empty."
        return
    rank = len(kernel) if kernel is not None else None if sizes is None else len(sizes)
    yield from _along_axes(node, rank)
    if padding != "NOTSET" and "pads" in node.attributes and convolves(node):
        yield f"it has both auto_pad={padding} and pads."


def _along_axes(node: ir.Node, rank: int | None) -> Iterator[str]:
    """Objections to attributes with numbers for each axis of windows of a `rank`, which the schema does not restrict."""
    x = node.inputs[0] if node.inputs else None
    if node.op_type == "Col2Im":
        block = node.inputs[2] if len(node.inputs) > 2 else None
        rank = block.shape[0] if block is not None and block.shape and isinstance(block.shape[0], int) else None
    elif rank is not None and x is not None and x.shape is not None and len(x.shape) != rank + 2:
        yield f"its windows have {rank} axes, but its input has {len(x.shape)}: batch, channels, and one for each."
    for key, (per_axis, least) in _PER_AXIS.items():
        values = _value(node, key)
        if values is None:
            continue
        if rank is not None and per_axis and len(values) != per_axis * rank:
            yield f"its {key} are {list(values)}, but {rank} spatial axes take {per_axis * rank}."
        if min(values, default=1) < least:
            yield f"its {key} are {list(values)}, and must not be below {least}."
        if max(values, default=1) >= 2**31:
            yield f"its {key} are {list(values)}, and no tensor has that many rows."


def _value(node: ir.Node, key: str, kind: ir.AttributeType = ir.AttributeType.INTS) -> Any:
    """The value of an attribute, `None` if there is none of that type."""
    attribute = node.attributes.data.get(key)
    return None if attribute is None or attribute.type != kind else attribute.value
