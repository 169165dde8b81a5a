"""Refuse models and nodes that cannot be used, with the reason and the remedy."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import onnx
import onnx_ir as ir

from onnx_convgrad.errors import ModelError
from onnx_convgrad.frontend.gradient_edges import GRADIENT, TRAINING_DOMAIN, label

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
    blocked = [node for node in graph.all_nodes() if node.domain in _RUNTIME_LAYOUTS]
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
    gradients = [n for n in graph.all_nodes() if (n.domain, n.op_type) == (TRAINING_DOMAIN, GRADIENT)]
    if gradients:
        raise ModelError(
            f"{len(gradients)} of the model's nodes, the first {label(gradients[0])}, are Gradient of {TRAINING_DOMAIN}.",
            hint="Apply onnx_convgrad.lower_gradient_ops to the model first, or `onnx-convgrad lower`.",
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
_CONVOLUTIONS = frozenset(("Conv", "ConvTranspose"))
_SHOWN = 5
_POSITIONS = frozenset(("axis", "batch_dims", "batch_axis", "new_axis", "time_axis"))
_MOST_AXES = 1000
_COUNTS = frozenset(("blocksize", "group", "hidden_size", "kv_num_heads", "num_groups", "offset_group", "q_num_heads"))
_SWITCHES = frozenset(
    "allowzero antialias ceil_mode count_include_pad exclude_outside exclusive fmod inverse is_causal keepdims largest"
    " layout linear_before_reset noop_with_empty_axes onesided periodic reverse saturate select_last_index sorted"
    " storage_order training_mode transA transB upper".split()
)
"""Attributes that are 0 or 1: runtimes differ in what other numbers mean."""
_WINDOWED = _CONVOLUTIONS | {"MaxPool", "AveragePool", "LpPool"}


def has_known_operands(model: ir.Model) -> bool:
    """Whether onnx's inference can be given the model: with operands of unknown type, some operators end the process."""
    fragile = (node for node in model.graph.all_nodes() if node.op_type in _NEED_TYPES)
    return all(value is None or value.dtype is not None for node in fragile for value in node.inputs)


_NEED_TYPES = frozenset(("DictVectorizer", "EyeLike", "LabelEncoder", "RegexFullMatch", "TreeEnsemble"))


def refuse_malformed_nodes(model: ir.Model) -> None:
    """Compare nodes of ai.onnx with their schemas (operands, attributes) and convolutions with their weights.

    Raises:
        ModelError: Listing every node that does not comply, and why.
    """
    version = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 0))
    problems = []
    for node in model.graph.all_nodes():
        if node.domain:
            continue
        name = node.name or next((v.name for v in node.outputs if v.name), "unnamed")
        problems += [f"{name!r} ({node.op_type}, opset {version}): {reason}" for reason in _objections(node, version)]
    if problems:
        head = f"{len(problems)} node{'s are' if len(problems) > 1 else ' is'} not valid, as ONNX Runtime will say too:"
        more = [f"and {len(problems) - _SHOWN} more."] if len(problems) > _SHOWN else []
        raise ModelError("\n".join([head, *(f"  - {problem}" for problem in problems[:_SHOWN]), *more]))


def _objections(node: ir.Node, version: int) -> Iterator[str]:
    schema = _schema(node.op_type, version)
    if schema is None:
        return
    for what, count, least, most in (
        ("inputs", len(node.inputs), schema.min_input, schema.max_input),
        ("outputs", len(node.outputs), schema.min_output, schema.max_output),
    ):
        if not least <= count <= most:
            allowed = f"{least}" if least == most else f"{least} or more" if most > 1000 else f"{least} to {most}"
            yield f"it has {count} {what[:-1] if count == 1 else what}, and must have {allowed}."
    yield from _wrong_attributes(node, schema)
    yield from _wrong_positions(node)
    if node.op_type in _WINDOWED:
        yield from _windows(node)
    if node.op_type == "Einsum":
        yield from _wrong_equation(node)


def _wrong_equation(node: ir.Node) -> Iterator[str]:
    """Objections to the equation of an Einsum; onnx's shape inference never ends on some."""
    attribute = node.attributes.get("equation")
    if attribute is None or not isinstance(attribute.value, str):
        return
    equation, count = attribute.value, len(node.inputs)
    if not _EQUATION.fullmatch(equation):
        yield f"its equation {equation!r} has not the form 'ij,jk->ik'."
    elif equation.count(",") + 1 != count:
        yield f"its equation {equation!r} has a term for {equation.count(',') + 1} of its {count} inputs."


_TERM = r"[A-Za-z ]*(\.\.\.[A-Za-z ]*)?"
_EQUATION = re.compile(rf"{_TERM}(,{_TERM})*(->{_TERM})?")


def _wrong_attributes(node: ir.Node, schema: onnx.defs.OpSchema) -> Iterator[str]:
    """Objections to the names and the types of attributes."""
    for key, attribute in node.attributes.items():
        if key in schema.attributes:
            wanted: Any = schema.attributes[key].type
            if attribute.type.value != wanted.value:
                yield f"its attribute {key} is of type {attribute.type.name}, and must be {wanted.name}."
            elif isinstance(attribute.value, bytes):
                yield f"its attribute {key} is not UTF-8 text."
            elif isinstance(attribute.value, float) and not _is_allowed(attribute.value, node.op_type):
                yield f"its attribute {key} is {attribute.value}."
        elif not key.startswith("__"):
            yield f"it has an attribute {key!r}, which {node.op_type} does not have."
    for key, known in schema.attributes.items():
        if known.required and key not in node.attributes:
            yield f"its attribute {key} is missing."


def _is_allowed(number: float, op_type: str) -> bool:
    return math.isfinite(number) or op_type == "Constant" or (math.isinf(number) and op_type in ("Clip", "Pad"))


def _wrong_positions(node: ir.Node) -> Iterator[str]:
    """Objections to numbers of axes and of outputs, of which some end the process in onnx's inference, and to switches."""
    for key in _POSITIONS & node.attributes.keys():
        number = _int(node, key)
        if number is not None and abs(number) > _MOST_AXES:
            yield f"its {key} is {number}, and no tensor has that many axes."
        elif number is not None and key == "batch_dims" and number < 0:
            yield f"its batch_dims is {number}, and must be at least 0."
    for key in _COUNTS & node.attributes.keys():
        number = _int(node, key)
        if number is not None and not 0 < number < 2**31:
            yield f"its {key} is {number}, and must be a size above 0."
    for key in _SWITCHES & node.attributes.keys():
        if _int(node, key) not in (None, 0, 1):
            yield f"its {key} is {_int(node, key)}, and must be 0 or 1."
    parts = _int(node, "num_outputs") if node.op_type == "Split" else None
    if parts is not None and parts != len(node.outputs):
        yield f"its num_outputs is {parts}, but it has {len(node.outputs)} outputs."


def _int(node: ir.Node, key: str) -> int | None:
    attribute = node.attributes.get(key)
    usable = attribute is not None and attribute.type == ir.AttributeType.INT and not attribute.is_ref()
    return attribute.as_int() if usable and attribute is not None else None


@cache
def _schema(op_type: str, version: int) -> onnx.defs.OpSchema | None:
    """The schema of an operator; `None` if ONNX does not know it, as a runtime may."""
    try:
        return onnx.defs.get_schema(op_type, max_inclusive_version=version, domain="")
    except onnx.defs.SchemaError:
        return None


def _windows(node: ir.Node) -> Iterator[str]:
    """Objections to attributes of convolutions and pools whose values the schema does not restrict."""
    attribute = node.attributes.get("auto_pad")
    is_string = attribute is not None and attribute.type == ir.AttributeType.STRING
    padding = (attribute.as_string() if is_string and attribute is not None else "") or "NOTSET"
    if padding not in _AUTO_PADS:
        yield f"its auto_pad is {padding!r}, and must be one of {', '.join(_AUTO_PADS)}."
    weight = node.inputs[1] if node.op_type in _CONVOLUTIONS and len(node.inputs) > 1 else None
    sizes = None if weight is None or weight.shape is None else list(weight.shape)[2:]
    kernel = _ints(node, "kernel_shape")
    if sizes is not None and kernel is not None:
        pairs = zip(kernel, sizes, strict=False)
        if len(kernel) != len(sizes) or any(isinstance(b, int) and a != b for a, b in pairs):
            yield f"its kernel_shape is {list(kernel)}, but its weight has the kernel {'x'.join(map(str, sizes))}."
            return
    if kernel is not None and not kernel:
        yield "its kernel_shape is empty."
        return
    rank = len(kernel) if kernel is not None else None if sizes is None else len(sizes)
    for key, per_axis in (("strides", 1), ("dilations", 1), ("pads", 2)):
        values = _ints(node, key)
        if values is None:
            continue
        if rank is not None and len(values) != per_axis * rank:
            yield f"its {key} are {list(values)}, but {rank} spatial axes take {per_axis * rank}."
        least = 1 if per_axis == 1 else 0
        if min(values, default=1) < least:
            yield f"its {key} are {list(values)}, and must not be below {least}."
    if node.op_type in _CONVOLUTIONS and padding != "NOTSET" and "pads" in node.attributes:
        yield f"it has both auto_pad={padding} and pads."


def _ints(node: ir.Node, key: str) -> Sequence[int] | None:
    attribute = node.attributes.get(key)
    return None if attribute is None or attribute.type != ir.AttributeType.INTS else attribute.as_ints()
