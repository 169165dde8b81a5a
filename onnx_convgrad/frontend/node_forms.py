"""Refuse nodes that do not comply with the schema of their operator, listing all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import onnx
import onnx_ir as ir

from onnx_convgrad.errors import ModelError

_AUTO_PADS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")
_CONVOLUTIONS = frozenset(("Conv", "ConvTranspose"))
_SHOWN = 5
_WINDOWED = _CONVOLUTIONS | {"MaxPool", "AveragePool", "LpPool"}


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
    for key, attribute in node.attributes.items():
        if key in schema.attributes:
            wanted: Any = schema.attributes[key].type
            if attribute.type.value != wanted.value:
                yield f"its attribute {key} is of type {attribute.type.name}, and must be {wanted.name}."
        elif not key.startswith("__"):
            yield f"it has an attribute {key!r}, which {node.op_type} does not have."
    for key, known in schema.attributes.items():
        if known.required and key not in node.attributes:
            yield f"its attribute {key} is missing."
    if node.op_type in _WINDOWED:
        yield from _windows(node)


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
