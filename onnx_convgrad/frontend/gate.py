"""Check a model once, right after it is read, so that later stages can rely on its structure.

Later stages assume: tensors hold as many numbers as their shapes say; attributes refer to attributes of functions only
inside functions; every graph input has a type and is listed once; sizes are small enough for 64 bits; functions call each
other without recursion and expand to a bounded number of nodes; and nothing is nested too deeply. ONNX's C++ shape inference
ends the whole process on some nodes that break these rules.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

import onnx
import onnx_ir as ir

from onnx_convgrad.base.limits import check_limit
from onnx_convgrad.errors import ModelError
from onnx_convgrad.ir.nodes import all_nodes

_LARGEST = 2**63 - 1
"""Most elements of a tensor: ONNX counts them with signed 64-bit numbers."""


Locate = Callable[[ir.ExternalTensor, str], ir.ExternalTensor]
"""Check the file of an external tensor and return the tensor to read; the text begins the sentence of an error."""


_MOST_AXES = 64
"""Most axes of a tensor, as of a NumPy array."""


def check_structure(model: ir.Model, locate: Locate) -> None:
    """Refuse a model whose structure is not what all later stages rely on; external tensors are located in place.

    Raises:
        ModelError: Naming the tensor, value, node or function at fault.
        LimitError: Functions expand to too many nodes, or graphs are nested too deeply.
    """
    _drop_damaged_notes(model)
    _Gate(locate).check(model.graph)
    _check_interface(model.graph)
    for function in model.functions.values():
        _Gate(locate, function.attributes, f" of function {function.name!r}").check(function.graph)
    if model.functions:
        _check_functions(model)


def _drop_damaged_notes(noted: ir.Model | ir.Graph | ir.Node | ir.Value) -> None:
    """Remove metadata and documentation that are not UTF-8 text: they could not be written again."""
    if not _is_text(noted.doc_string):
        noted.doc_string = None
    props = noted.metadata_props
    for key in [key for key, text in props.items() if not (_is_text(key) and _is_text(text))]:
        del props[key]


def _is_text(text: object) -> bool:
    """Whether onnx_ir has read a text; where that is not UTF-8, it keeps bytes."""
    return text is None or isinstance(text, str)


def _label(node: ir.Node) -> str:
    name = node.name or next((v.name for v in node.outputs if v.name), None) or "unnamed"
    return f"{name!r} ({node.op_type})"


# -- nodes -------------------------------------------------------------------------------------------------------------

_TENSORS = (ir.AttributeType.TENSOR, ir.AttributeType.TENSORS)
_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


class _Gate:
    """One walk over a graph, or over that of a function, which may refer to its `attributes`, and all nested graphs."""

    def __init__(self, locate: Locate, attributes: Collection[str] = (), where: str = "") -> None:
        self._locate, self._attributes, self._where = locate, attributes, where

    def check(self, graph: ir.Graph) -> None:
        level, depth = [graph], 0
        while level:
            check_limit("depth", depth, f"The nesting of graphs{self._where}")
            level, depth = [inner for outer in level for inner in self._graph(outer)], depth + 1

    def _graph(self, graph: ir.Graph) -> Iterator[ir.Graph]:
        """Check a graph; give the graphs nested in it."""
        _drop_damaged_notes(graph)
        for value in (*graph.inputs, *graph.initializers.values()):
            _drop_damaged_notes(value)
        for value in graph.initializers.values():
            value.const_value = self._tensor(value.const_value, f"The weight {value.name!r}")
            if value.is_graph_input():
                _check_stored(value)
        _check_values(graph)
        for node in graph:
            if node.attributes:
                yield from self._node(node)

    def _node(self, node: ir.Node) -> Iterator[ir.Graph]:
        for name, attribute in node.attributes.items():
            kind = attribute.type
            if not _is_text(attribute.doc_string):  # the caller's model may share the attribute
                node.attributes.add(ir.Attr(name, kind, attribute.value, attribute.ref_attr_name))
            if attribute.ref_attr_name is not None:
                if kind in _GRAPHS or attribute.ref_attr_name not in self._attributes:
                    objection = "which holds a graph" if kind in _GRAPHS else "which it does not have"
                    if not self._where:
                        objection = "but the node is in no function"
                    raise ModelError(
                        f"The attribute {name!r} of node {_label(node)}{self._where} refers to the attribute"
                        f" {attribute.ref_attr_name!r} of a function, {objection}."
                    )
            elif kind in _GRAPHS:
                yield from (attribute.value,) if kind == ir.AttributeType.GRAPH else attribute.value
            elif kind in _TENSORS:
                self._attribute(node, attribute)

    def _attribute(self, node: ir.Node, attribute: ir.Attr) -> None:
        what = f"The attribute {attribute.name} of node {_label(node)}"
        one = attribute.type == ir.AttributeType.TENSOR
        given = [attribute.value] if one else list(attribute.value)
        checked = [_unnamed(self._tensor(tensor, what)) for tensor in given]
        node.attributes.add(ir.Attr(attribute.name, attribute.type, checked[0] if one else checked))

    def _tensor(self, tensor: Any, what: str) -> Any:
        if isinstance(tensor, (ir.ExternalTensor, ir.LazyTensor)):
            _check_dims(tensor.shape, what)
        if isinstance(tensor, ir.ExternalTensor):
            return self._locate(tensor, what)
        _check_tensor(tensor, what)
        return tensor


# -- values ------------------------------------------------------------------------------------------------------------


def _check_interface(graph: ir.Graph) -> None:
    """Check the names and types of graph inputs and outputs."""
    for what, values in (("input", graph.inputs), ("output", graph.outputs)):
        for position, value in enumerate(values):
            if not value.name or not isinstance(value.name, str):
                raise ModelError(f"The {what} {position} of the model has no name, or one that is not UTF-8 text.")
    for name, count in Counter(value.name for value in graph.inputs).items():
        if count > 1:
            raise ModelError(f"The input {name!r} of the model is listed {count} times.")
    for value in graph.inputs:
        if value.type is None or value.dtype == ir.DataType.UNDEFINED:
            raise ModelError(f"The input {value.name!r} of the model has no type.")


def _check_values(graph: ir.Graph) -> None:
    """Check that each value is defined once, and that its declared shape is possible."""
    defined = {*graph.initializers, *(value.name for value in graph.inputs)}
    for value in graph.inputs:
        _check_shape(value)
    for node in graph:
        if not all(isinstance(text, str) for text in (node.name or "", node.op_type, node.domain)):
            raise ModelError(
                f"The name, operator or domain of node {node.name!r} ({node.op_type!r}) is not UTF-8 text."
            )
        _drop_damaged_notes(node)
        for value in node.outputs:
            _drop_damaged_notes(value)
            if not isinstance(value.name or "", str):
                raise ModelError(f"The name of value {value.name!r} is not UTF-8 text.")
            if value.shape is not None:
                _check_shape(value)
            if value.dtype == ir.DataType.UNDEFINED:
                value.type = None
            if value.name:
                if value.name in defined:
                    raise ModelError(
                        f"The value {value.name!r} is defined more than once: by node {_label(node)}, and before."
                    )
                defined.add(value.name)


def _check_shape(value: ir.Value) -> None:
    if value.shape is not None and len(value.shape) > _MOST_AXES:
        raise ModelError(
            f"The value {value.name!r} has {len(value.shape)} axes, and at most {_MOST_AXES} are supported."
        )
    size = math.prod(d for d in value.shape or () if isinstance(d, int))
    if size > _LARGEST:
        raise ModelError(f"The value {value.name!r} of shape {value.shape} has more elements than 64 bits count.")


def _check_stored(value: ir.Value) -> None:
    """Compare an initializer that is a graph input with its declaration."""
    stored = value.const_value
    if stored is None or value.shape is None:
        return
    declared, sizes = list(value.shape), list(stored.shape)
    fits = declared == [size if isinstance(d, int) else d for d, size in zip(declared, sizes, strict=False)]
    if not fits or len(declared) != len(sizes) or value.dtype not in (None, stored.dtype):
        raise ModelError(
            f"The weight {value.name!r} is {stored.dtype} of shape {sizes}, but declared as an input of type"
            f" {value.dtype} and shape [{', '.join(map(str, declared))}]."
        )


def _unnamed(tensor: Any) -> Any:
    """A tensor whose name may be set: `onnx_ir` writes names of tensors into the proto, which is the caller's."""
    if not isinstance(tensor, ir.TensorProtoTensor):
        return tensor
    return ir.Tensor(tensor, dtype=tensor.dtype, shape=tensor.shape, name=tensor.name)


# -- tensors -----------------------------------------------------------------------------------------------------------


def _check_tensor(tensor: ir.TensorProtocol | None, what: str) -> None:
    """Refuse a tensor whose data are of another size than its shape says; `what` begins the sentence of the error."""
    proto = tensor.raw if isinstance(tensor, ir.TensorProtoTensor) else None
    if proto is None:
        if isinstance(tensor, ir.StringTensor) and len(tensor.string_data()) != tensor.size:
            raise ModelError(f"{what} of shape {tensor.shape} has {len(tensor.string_data())} strings.")
        return
    _check_dims(proto.dims, what)
    if proto.data_type not in _FIELDS:
        raise ModelError(f"{what} has the unknown element type {proto.data_type}.")
    if proto.HasField("segment"):
        raise ModelError(f"{what} is stored in segments, which no version of ONNX Runtime reads.")
    if proto.HasField("raw_data"):
        wanted, held, unit = tensor.nbytes, len(proto.raw_data), "bytes"  # type: ignore[union-attr]
    else:
        field, numerator, denominator = _FIELDS[proto.data_type]
        wanted, unit = -(-math.prod(proto.dims) * numerator // denominator), "numbers"
        held = len(getattr(proto, field))
    if wanted != held:
        raise ModelError(
            f"{what} of shape {list(proto.dims)} takes {wanted} {unit}, but the file has {held} of it.",
            hint="The file may be damaged.",
        )


def _check_dims(dims: Iterable[Any], what: str) -> None:
    dims = list(dims)
    if len(dims) > _MOST_AXES or any(not isinstance(d, int) or d < 0 for d in dims) or math.prod(dims) > _LARGEST:
        raise ModelError(f"{what} cannot have the shape {list(dims)}.")


def _field(dtype: ir.DataType) -> tuple[str, int, int]:
    """The field of a TensorProto with the numbers of a type, and the entries of the field per so many elements."""
    packed = 1 if dtype == ir.DataType.STRING else max(8 // dtype.bitwidth, 1)
    entries = 2 if dtype in (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128) else 1
    return onnx.helper.tensor_dtype_to_field(int(dtype)), entries, packed


_KNOWN = frozenset(onnx.TensorProto.DataType.values())
_FIELDS = {int(dtype): _field(dtype) for dtype in ir.DataType if dtype and dtype in _KNOWN}


# -- functions ---------------------------------------------------------------------------------------------------------


def _check_functions(model: ir.Model) -> None:
    """Check that function calls end, fit the functions, and expand to a bounded number of nodes."""
    for function in model.functions.values():
        if function.domain in ("", "ai.onnx") and onnx.defs.has(function.name):
            raise ModelError(
                f"The model has a function with the name of the operator {function.name!r}, and runtimes differ in which"
                " they run.",
                hint="Rename the function.",
            )
        for what, values in (("input", function.inputs), ("output", function.outputs)):
            if any(not value.name for value in values):
                raise ModelError(f"The function {function.name!r} has an {what} without a name.")
    check_limit("nodes", expanded_nodes(model), "Inlining the model's functions")


def expanded_nodes(model: ir.Model) -> int:
    """Number of nodes that the functions of a model become; raises `ModelError` for calls that do not fit or never end."""
    functions = model.functions
    callees = {key: {n.op_identifier() for n in f.all_nodes()} & functions.keys() for key, f in functions.items()}
    try:
        order = list(TopologicalSorter(callees).static_order())
    except CycleError as problem:
        name = functions[problem.args[1][0]].name
        raise ModelError(f"The function {name!r} calls itself, directly or through others.") from None
    added: dict[ir.OperatorIdentifier, int] = {}
    depths: dict[ir.OperatorIdentifier, int] = {}
    for key in order:
        depths[key] = max((1 + depths[callee] for callee in callees[key]), default=0)
        check_limit("depth", depths[key], f"The chain of calls from function {functions[key].name!r}")
        where = f"function {functions[key].name!r}"
        added[key] = sum(1 + _call(node, model, added, where) for node in functions[key].all_nodes())
    return sum(_call(node, model, added, "the model") for node in all_nodes(model.graph))


def _call(node: ir.Node, model: ir.Model, added: dict[ir.OperatorIdentifier, int], where: str) -> int:
    """Number of nodes that a node becomes, beyond itself; checks the operands of a call."""
    function = model.functions.get(node.op_identifier())
    if function is None:
        return 0
    for what, count, most in (
        ("inputs", len(node.inputs), len(function.inputs)),
        ("outputs", len(node.outputs), len(function.outputs)),
    ):
        if count > most:
            raise ModelError(f"Node {_label(node)} of {where} has {count} {what}, but its function has {most}.")
    return added[node.op_identifier()]
