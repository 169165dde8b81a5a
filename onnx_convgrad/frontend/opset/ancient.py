"""Convert opsets before 7 (2017) with ONNX's own version converter."""

from __future__ import annotations

import onnx
import onnx.version_converter
import onnx_ir as ir

from onnx_convgrad.errors import ModelError
from onnx_convgrad.frontend.opset.upgrade import OLDEST_OPSET
from onnx_convgrad.ir.nodes import is_op


def convert_ancient(model: ir.Model) -> ir.Model:
    """Return the model at opset 8 if its opset is older than 7, else the model itself.

    Raises:
        ModelError: The converter refuses the model.
    """
    version = model.opset_imports.get("", OLDEST_OPSET)
    if version >= OLDEST_OPSET:
        return model
    try:
        _align_slopes(model)
        return ir.from_proto(onnx.version_converter.convert_version(ir.to_proto(model), OLDEST_OPSET + 1))
    except Exception as problem:
        raise ModelError(
            f"The model has opset {version}, and ONNX's version converter cannot bring it to {OLDEST_OPSET + 1}: {problem}."
        ) from problem


def _align_slopes(model: ir.Model) -> None:
    """Give the slopes of a PRelu trailing axes: before opset 7 they went along the channels, which the converter ignores."""
    nodes = [n for n in model.graph if is_op(n, "PRelu") and n.inputs[1] is not None and n.inputs[1].shape != (1,)]
    ranks = {}
    if nodes:
        inferred = onnx.shape_inference.infer_shapes(ir.to_proto(model)).graph
        for info in (*inferred.input, *inferred.value_info, *inferred.output):
            ranks[info.name] = len(info.type.tensor_type.shape.dim)
    for node in nodes:
        x, slope = node.inputs[:2]
        rank = ranks.get("" if x is None else x.name or "")
        if rank is None:
            raise ValueError(f"the rank of the operand of PRelu {node.name!r} is not known")
        if rank > 2:
            aligned = ir.Node("", "Unsqueeze", [slope], [ir.AttrInt64s("axes", list(range(1, rank - 1)))])
            aligned.outputs[0].name = f"{node.outputs[0].name}_slope"
            model.graph.insert_before(node, aligned)
            node.replace_input_with(1, aligned.outputs[0])
