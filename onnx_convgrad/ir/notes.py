"""Notes that one stage leaves on a value, a node or a model for a later one: every key, who writes it and who reads it.

Notes in `meta` live while a graph is being transformed; notes in `metadata_props` are strings and are written to the file.
Results of the public functions are documented in `onnx_convgrad.api`.
"""

from __future__ import annotations

import re

import onnx_ir as ir

# -- in the file: metadata_props of a model ----------------------------------------------------------------------------

GRADIENTS = "onnx_convgrad.gradients"
"""JSON object: differentiated value -> graph output with its derivative. Written by `pipeline` for users."""

DERIVATIVE_INPUTS = "onnx_convgrad.seeds"
"""JSON object: value -> graph input with its cotangent or tangent; a value with a cotangent of ones is left out.

Written by `pipeline` for users and for `check`.
"""

CONSTANTS = "onnx_convgrad.constants"
"""JSON list: stored floating values that are not parameters. Written by `pipeline`, read when a result is loaded again."""

UPDATES = "onnx_convgrad.updates"
"""JSON object: stored tensor -> graph output with its next value. Written by `gradient_ops` for users."""

MANIFEST = "onnx_convgrad.training"
"""JSON: the manifest of a training program. Written by `programs`, read by `training`."""

PROGRAM = "onnx_convgrad.program"
"""Digest of a saved training program, the same in all of its files. Written and read by `programs`."""

EXCHANGES = "onnx_convgrad.exchanges"
"""JSON: outputs and inputs with which ranks exchange numbers inside a step. Written by `programs`, read by
`training`."""

QUANTIZATION = "onnx_convgrad.quantization"
"""`"qat"` or `"lsq"`: a model with float master weights behind quantizers. Written and read by `training`, which removes it
from exported models."""

ADAPTERS = "onnx_convgrad.adapters"
"""JSON: rank, alpha and the names of the adapters of a model. Written and read by `adapters`, verified in the graph."""

LOOPS = "onnx_convgrad.loops"
"""JSON object: result of a loop over samples -> the abstract operator, operands and attributes that it computes.

Written and read by `lowering.loops`, so that a result can be differentiated again. Before values have their final names, the
same entries are kept in `graph.meta`.
"""

# -- in the file: metadata_props of a node or a value ------------------------------------------------------------------

ORIGIN = "onnx_convgrad.origin"
"""Node: name of the forward node whose gradient it computes. Written by the `Emitter`; the last stage removes it."""

VEIL = "onnx_convgrad.veil"
"""Identity node that keeps two inputs of a function apart. Written and removed by `frontend.gradient_edges`."""

PARTS = "onnx_convgrad.parts"
"""Concat node that joins the parts of a stored value, of which some are trained. Written and read by `frontend.parts`."""

INITIALIZER_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
"""Initializer: `PARAMETER` or `BUFFER`. Written by PyTorch's newer exporter, and by `frontend.exporters` when it undoes a
merge; read to tell parameters from constants."""

OPERATION = "pkg.torch.onnx.fx_node"
"""Node: the operation of PyTorch that it computes, as text. Written by PyTorch's newer exporter; read by
`frontend.exporters`, by `autodiff.activity` for `detach`, and by rules of operators that stand for operations with different
derivatives at kinks."""

IN_PLACE = "onnx_convgrad.in_place"
"""Output of a training program: name of the input in whose memory it may be written. Written by `memory.in_place`, read by
`memory.timeline` and `training`."""

# -- while a graph is transformed: meta of a value, or of the graph ------------------------------------------------------

FOLDED_VALUE = "onnx_convgrad.folded_value"
"""Value: the array that it was folded to, or `None`; a cache of `ir.constants`."""

MARKED_CONSTANT = "onnx_convgrad.marked_constant"
"""Value without data that represents a constant. Written by the cost model, read by `ir.constants`."""

VARIES = "onnx_convgrad.varies"
"""Initializer: a variable of the differentiation, whose data must not be folded. Written by `pipeline`."""

RATIO = "onnx_convgrad.ratio"
"""Dropout: its ratio where it is not an operand, since ONNX Runtime refuses it or the node is in inference mode. Written by
`frontend.opset` and, into files, by `programs.inference`; read by `pipeline.modes`."""

REPLACEABLE = "onnx_convgrad.replaceable"
"""Initializer: a frozen weight, which may be replaced in the finished graph: its data must not be folded. Written by
`programs`, read by `ir.constants`."""

ROLES = "onnx_convgrad.roles"
"""Graph: name of an input or a stored value -> its role. Written and read by `frontend.roles`."""

ALGORITHM = "onnx_convgrad.algorithm"
"""Whether the file of a model has a training algorithm, which onnx_ir does not keep.

Written by `frontend.files`, read by `gradient_ops`.
"""

RESTORED = "onnx_convgrad.restored"
"""Initializer: name of the one that the file stores in its place; empty if it stores none. Written and read by
`frontend.exporters.separate_merged`."""

_CONSTANT_NODE = "onnx_convgrad.constant_node"
"""Initializer: whether the file stored it as a Constant node. Written by canonicalization."""

_FIXED = "onnx_convgrad.fixed"
"""Initializer: a constant, as the converter knows that wrote it, or the operator that read it. Written by
`frontend.opset`."""

_BOUND = "onnx_convgrad.bound"
"""Initializer: an input that the caller bound to a constant. Written by `frontend.bound_inputs`."""


def origin_of(node: ir.Node) -> str:
    """Name of the forward node whose gradient a node computes; empty for a node of the model itself."""
    return node.metadata_props.get(ORIGIN, "")


def operation_of(node: ir.Node) -> str:
    """The operation of PyTorch that a node computes, such as `relu6.default`; empty if the file does not say."""
    found = _ATEN.search(node.metadata_props.get(OPERATION, ""))
    return found[1] if found else ""


def is_detach(node: ir.Node) -> bool:
    """Whether a node is PyTorch's `detach`, which copies the numbers of a value but has no derivative.

    `Embedding(max_norm=...)` detaches its weight, too, but only to scale it in place: its gradient is that of the result.
    """
    if node.op_type != "Identity" or operation_of(node) != "detach.default":
        return False
    return all(operation_of(use.node) != "embedding_renorm.default" for use in node.outputs[0].uses())


def keep_detach(copy: ir.Node, node: ir.Node) -> None:
    """Note on the copy of a node that it is PyTorch's `detach`, if the node is."""
    if is_detach(node):
        copy.metadata_props[OPERATION] = node.metadata_props[OPERATION]


_ATEN = re.compile(r"torch\.ops\.aten\.([\w.]+)")


def is_declared_parameter(value: ir.Value) -> bool:
    """Whether the exporter noted that an initializer is a parameter."""
    return value.metadata_props.get(INITIALIZER_KIND) == "PARAMETER"


def mark_lifted(value: ir.Value, *, from_node: bool) -> None:
    """Record whether an initializer was a Constant node in the file."""
    value.meta[_CONSTANT_NODE] = from_node


def mark_fixed(value: ir.Value) -> None:
    """Record that an initializer is a constant, which is not trained by default."""
    value.meta[_FIXED] = True


def is_fixed(value: ir.Value) -> bool:
    """Whether an initializer is a constant of a converted operator."""
    return _FIXED in value.meta


def mark_bound(value: ir.Value) -> None:
    """Record that an initializer was an input of the file, which the caller bound to a constant."""
    value.meta[_BOUND] = True


def is_bound(value: ir.Value) -> bool:
    """Whether an initializer was an input of the file, which the caller bound to a constant."""
    return _BOUND in value.meta


def was_constant_node(value: ir.Value) -> bool | None:
    """Whether an initializer was a Constant node in the file; `None` if canonicalization did not see it."""
    found: bool | None = value.meta.get(_CONSTANT_NODE)
    return found
